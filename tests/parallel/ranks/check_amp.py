"""torch.amp's GradScaler: steps that overflow, scales that change, gradient clipping."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from conftest import assert_same_everywhere, batches, flat_parameters, make_model
from rank_optimizers import distributed
from scheme_cases import scheme
from states import plain

from hvd_adaptive import instances

SCHEMES = {
    "alq": scheme("alq-3", update_steps=[1]),
    "feedback": scheme("bingrad-biased", error_feedback=1.0),
    "alq_feedback": scheme("alq-4", update_steps=[1], error_feedback=0.5),
    "auto_feedback": scheme("qsgd-4", error_feedback="auto"),
    "ecdq": scheme("ecdq-3", update_steps=[1]),
}
every_scheme = pytest.mark.parametrize("scheme", SCHEMES)
OVERFLOWS = (1, 3)


def new_scaler(**keywords) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**12, **keywords)


def amp_step(model, optimizer, scaler, batch, overflows=False, clip=None, dtype=None) -> None:
    x, y = batch()
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        loss = torch.nn.functional.cross_entropy(model(x), y)
    scaler.scale(loss * 1e38 if overflows else loss).backward()
    optimizer.synchronize()
    if clip is not None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    scaler.update()


def frozen_state(compressor) -> dict:
    """What a step that is skipped must leave alone."""
    state = compressor.state_dict()
    kept = ("table", "code", "version", "residuals", "feedback_weights")
    return {name: state[name] for name in kept if name in state}


@every_scheme
def test_an_overflow_on_one_rank_skips_the_step_on_all(scheme):
    """Residuals ignore that step; the update that was due in it is fitted to what is finite."""
    model, scaler = make_model(), new_scaler()
    compressor = SCHEMES[scheme](bucket_size=512, grad_scaler=scaler)
    optimizer = distributed(model, compressor)
    batch, fitted = batches(hvd.rank()), scheme in ("alq", "alq_feedback", "ecdq")
    for step in range(5):
        overflows = step in OVERFLOWS
        before, state = flat_parameters(model), frozen_state(compressor)
        due = compressor._training.updates.due(step)
        scale = scaler.get_scale()
        here = overflows and hvd.rank() == hvd.size() - 1
        dtype = torch.bfloat16 if step % 2 else torch.float16
        amp_step(model, optimizer, scaler, batch, here, clip=1.0, dtype=dtype)
        assert torch.equal(flat_parameters(model), before) == overflows
        assert scaler.get_scale() == (scale / 2 if overflows else scale)
        if overflows:
            kept = ("residuals",) if due else tuple(state)
            after = frozen_state(compressor)
            found, wanted = ({n: s[n] for n in kept if n in s} for s in (after, state))
            assert plain(found) == plain(wanted)
            assert compressor.report()["non_finite"] > 0
        assert compressor.report()["table_version"] >= (fitted and step >= 1)
    assert_same_everywhere(flat_parameters(model), f"amp.{scheme}")
    if "alq" in scheme:
        assert_same_everywhere(compressor.levels.float(), f"amp.{scheme}.levels")


@every_scheme
def test_a_scale_that_changes_leaves_no_trace(scheme):
    """Scales are powers of two: every bit is that of a run without a scaler."""
    ends = []
    for scaled in (False, True):
        instances.start_over()
        model = make_model()
        scaler = new_scaler(enabled=scaled, growth_interval=2)
        compressor = SCHEMES[scheme](bucket_size=512, grad_scaler=scaler)
        optimizer = distributed(model, compressor)
        batch = batches(hvd.rank())
        scales = set()
        for _ in range(5):
            amp_step(model, optimizer, scaler, batch)
            scales.add(scaler.get_scale())
        assert len(scales) == (3 if scaled else 1)
        ends.append((flat_parameters(model), frozen_state(compressor)))
    assert torch.equal(ends[0][0], ends[1][0])
    if "feedback" in scheme:
        assert plain(ends[0][1]["residuals"]) == plain(ends[1][1]["residuals"])
    if scheme == "auto_feedback":
        assert ends[0][1]["feedback_weights"] == ends[1][1]["feedback_weights"]


@every_scheme
def test_clipping_is_of_the_average(scheme):
    """synchronize(), clip, skip_synchronize(): the norm that is cut is the same everywhere."""
    model = make_model()
    optimizer = distributed(model, SCHEMES[scheme](bucket_size=512), lr=1.0)
    x, y = batches(hvd.rank())()
    before = flat_parameters(model)
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.synchronize()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with optimizer.skip_synchronize():
        optimizer.step()
    assert norm > 1e-2
    moved = flat_parameters(model) - before
    torch.testing.assert_close(moved.norm(), torch.tensor(1e-3), rtol=1e-3, atol=0)
    assert_same_everywhere(norm.reshape(1), "clipped norm")
