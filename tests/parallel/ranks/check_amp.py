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

SCHEMES = {
    "alq": scheme("alq-3", update_steps=[1]),
    "feedback": scheme("bingrad-biased", error_feedback=1.0),
    "alq_feedback": scheme("alq-4", update_steps=[1], error_feedback=0.5),
    "auto_feedback": scheme("qsgd-4", error_feedback="auto"),
    "ecdq": scheme("ecdq-3", update_steps=[1]),
}
OVERFLOWS, CLIP = (1, 3), 0.01


def amp_step(model, optimizer, scaler, batch, overflows, dtype):
    """Return the norm that is clipped."""
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=dtype):
        loss = loss_of(model, batch)
    scaler.scale(loss * 1e38 if overflows else loss).backward()
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    scaler.update()
    return norm


def frozen_state(compressor) -> dict:
    """What a step that is skipped must leave alone."""
    state = compressor.state_dict()
    kept = ("table", "code", "version", "residuals", "feedback_weights")
    return {name: plain(state[name]) for name in kept if name in state}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_overflow_on_one_rank_skips_the_step_on_all(scheme):
    """Residuals ignore that step; the update that was due in it is fitted to what is finite. In
    the others the average is clipped: the norm is the same everywhere."""
    model, scaler = make_model(), torch.amp.GradScaler("cpu", init_scale=2.0**12)
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
        norm = amp_step(model, optimizer, scaler, batch(), here, dtype)
        moved = flat_parameters(model) - before
        assert moved.any() != overflows
        assert scaler.get_scale() == (scale / 2 if overflows else scale)
        if not overflows:
            assert norm > 0.1 and moved.norm() == pytest.approx(0.1 * CLIP, rel=1e-3)
            assert_same_everywhere(norm)
        else:
            after = frozen_state(compressor)
            assert all(after.get(name) == state.get(name) for name in kept)
            assert compressor.report()["non_finite"] > 0
        assert compressor.report()["table_version"] >= (fitted and step >= 1)
    assert_same_everywhere(model, *([compressor.levels] if "alq" in scheme else []))
