"""torch.amp's GradScaler: steps that overflow, scales that change, gradient clipping."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from scheme_cases import scheme
from states import plain
from training import (
    assert_same_everywhere,
    batches,
    distributed,
    flat_parameters,
    loss_of,
    make_model,
)

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


def amp_step(model, optimizer, scaler, batch, overflows=False, clip=None, dtype=None):
    """Return the norm that is clipped."""
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        loss = loss_of(model, batch)
    scaler.scale(loss * 1e38 if overflows else loss).backward()
    optimizer.synchronize()
    norm = None
    if clip is not None:
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    scaler.update()
    return norm


def frozen_state(compressor) -> dict:
    """What a step that is skipped must leave alone."""
    state = compressor.state_dict()
    kept = ("table", "code", "version", "residuals", "feedback_weights")
    return {name: plain(state[name]) for name in kept if name in state}


@every_scheme
def test_an_overflow_on_one_rank_skips_the_step_on_all(scheme):
    """Residuals ignore that step; the update that was due in it is fitted to what is finite. In
    the others the average is clipped: the norm is the same everywhere."""
    model, scaler = make_model(), new_scaler()
    compressor = SCHEMES[scheme](bucket_size=512, grad_scaler=scaler)
    optimizer = distributed(model, compressor)
    batch, fitted = batches(hvd.rank()), scheme in ("alq", "alq_feedback", "ecdq")
    for step in range(5):
        overflows = step in OVERFLOWS
        before, state = flat_parameters(model), frozen_state(compressor)
        kept = ("residuals",) if compressor._training.updates.due(step) else tuple(state)
        scale = scaler.get_scale()
        here = overflows and hvd.rank() == hvd.size() - 1
        dtype = torch.bfloat16 if step % 2 else torch.float16
        norm = amp_step(model, optimizer, scaler, batch(), here, clip=0.01, dtype=dtype)
        moved = flat_parameters(model) - before
        assert moved.any() != overflows
        assert scaler.get_scale() == (scale / 2 if overflows else scale)
        if not overflows:
            assert norm > 0.1 and moved.norm() == pytest.approx(0.1 * 0.01, rel=1e-3)
            assert_same_everywhere(norm)
        else:
            after = frozen_state(compressor)
            assert all(after.get(name) == state.get(name) for name in kept)
            assert compressor.report()["non_finite"] > 0
        assert compressor.report()["table_version"] >= (fitted and step >= 1)
    assert_same_everywhere(model, *([compressor.levels] if "alq" in scheme else []))


@every_scheme
def test_a_scale_that_changes_leaves_no_trace(scheme):
    """Scales are powers of two: every bit is that of a run without a scaler."""
    ends = []
    for scaled in (False, True):
        instances.start_over()
        model, scaler = make_model(), new_scaler(enabled=scaled, growth_interval=2)
        compressor = SCHEMES[scheme](bucket_size=512, grad_scaler=scaler)
        optimizer, batch, scales = distributed(model, compressor), batches(hvd.rank()), set()
        for _ in range(5):
            amp_step(model, optimizer, scaler, batch())
            scales.add(scaler.get_scale())
        assert len(scales) == (3 if scaled else 1)
        state = frozen_state(compressor)
        own = [state.get(name) for name in ("residuals", "feedback_weights")]
        assert (own[0] is not None) == ("feedback" in scheme)
        ends.append((plain(flat_parameters(model)), own))
    assert ends[0] == ends[1]
