"""Ranks that differ in the step: newcomers take the first rank's state, others are told."""

from __future__ import annotations

import itertools
import logging
import time

import horovod.torch as hvd
import pytest
import torch
from horovod.common.exceptions import HorovodInternalError
from training import (
    assert_same_everywhere,
    batches,
    distributed,
    loss_of,
    make_model,
    mean,
    restart,
    take_step,
    train,
    trained,
)

from hvd_adaptive import ALQ, ECDQ, QSGD, RankMismatchError, ScatterReduce
from hvd_adaptive.transport.horovod_world import HorovodWorld

SEEDS = itertools.count(9000)
ADAPTIVE = {"bits": 7, "norm": "linf", "bucket_size": 512}
SCHEMES = {
    "alq": lambda **k: ALQ(update_steps=[0, 2, 4], **ADAPTIVE, **k),
    "alq-scatter": lambda **k: ALQ(exchange=ScatterReduce(second_stage_bits=7), **ADAPTIVE, **k),
    "alq-parts": lambda **k: ALQ(parameter_bits={"0.*": 6}, **ADAPTIVE, **k),
    "qsgd": lambda **k: QSGD(bits=8, norm="linf", bucket_size=512, **k),
    "ecdq": lambda **k: ECDQ(bits=6, bucket_size=512, **k),
}


def veteran(scheme: str, steps: int = 3, **keywords):
    """The state of a compressor that all ranks have trained with."""
    compressor = SCHEMES[scheme](seed=next(SEEDS), **keywords)
    trained(compressor, steps)
    return compressor.state_dict(), compressor.parts.default.table_version


def newcomers(scheme: str, state, lr=0.0, **keywords):
    """A model, its optimizer and compressor, whose state the first rank alone has."""
    model, compressor = make_model(7), SCHEMES[scheme](seed=1, **keywords)
    if hvd.rank() == 0:
        compressor.load_state_dict(state)
    return model, distributed(model, compressor, lr=lr), compressor


@pytest.mark.ranks
@pytest.mark.parametrize("feedback", [None, 0.5], ids=["plain", "feedback"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_newcomers_take_the_first_ranks_state(scheme, feedback, caplog):
    """The averages of that very step are right, whether or not it is one at which tables are fitted
    for the first rank (step 4) or the newcomers (step 0)."""
    keywords = {"error_feedback": feedback} if scheme != "ecdq" else {}
    for steps in (3, 4) if scheme == "alq" else (3,):
        state, version = veteran(scheme, steps, **keywords)
        model, optimizer, compressor = newcomers(scheme, state, lr=0.1, **keywords)
        batch = batches(hvd.rank())
        caplog.clear()
        with caplog.at_level(logging.INFO, "hvd_adaptive"):
            for _ in range(2):
                optimizer.zero_grad()
                loss_of(model, batch()).backward()
                own = [p.grad.clone() for p in model.parameters()]
                optimizer.step()
                for gradient, p in zip(own, model.parameters(), strict=True):
                    exact = mean(gradient)
                    error = (p.grad.double() - exact).norm() / exact.norm()
                    assert error < 0.05 or feedback is not None, (scheme, float(error))
        assert compressor.step == steps + 2
        assert compressor.parts.default.table_version >= version
        told = [r for r in caplog.records if "go on from the first rank's step" in r.message]
        assert len(told) == 1
        assert (told[0].levelno == logging.WARNING) is (hvd.rank() != 0)
        assert_same_everywhere(model)
        tables = hvd.allgather_object(
            [repr(codec.tables_state().get("table")) for codec in compressor.parts.values()]
        )
        assert all(table == tables[0] for table in tables)


def step_of_zeros(state, weight):
    """A step of a newcomers' optimizer whose gradients are zero; its model and compressor."""
    model, optimizer, compressor = newcomers("qsgd", state, error_feedback=weight)
    take_step(optimizer, sum(p.sum() for p in model.parameters()) * 0.0)
    return model, compressor


def test_residuals_start_from_zero_and_the_first_ranks_stay():
    """They alone are sent."""
    state, _ = veteran("qsgd", error_feedback=1.0)
    model, _ = step_of_zeros(state, 1.0)
    residuals = hvd.broadcast_object(state["residuals"]["parameters"], 0, name="check.residuals")
    for name, parameter in model.named_parameters():
        sent = residuals.get(name, torch.zeros(parameter.numel())) / hvd.size()
        error = (parameter.grad.view(-1) - sent).norm()
        assert error <= 0.05 * sent.norm(), (name, float(error), float(sent.norm()))
    assert any(bool(residual.any()) for residual in residuals.values())


def test_newcomers_take_the_weights_of_error_feedback():
    """Without residuals nothing is measured, so the weights stay."""
    state, _ = veteran("qsgd", error_feedback="auto")
    for residual in state["residuals"]["parameters"].values():
        residual.zero_()
    del state["residuals_checksum"]
    _, compressor = step_of_zeros(state, "auto")
    expected = hvd.broadcast_object(state["feedback_weights"], 0, name="check.weights")
    assert compressor._training.residuals.weights.adapted == expected != {}


@pytest.mark.parametrize(
    "case", ["a checkpoint on rank 1 alone", "another checkpoint", "a step more"]
)
def test_other_differences_are_errors(case):
    state, _ = veteran("alq")
    model, compressor = make_model(), SCHEMES["alq"](seed=3)
    optimizer = distributed(model, compressor)
    if case == "a step more":
        train(model, optimizer, 2)
        compressor.step += hvd.rank() == 1
    elif hvd.rank() == 1:
        older = {"step": 2} if case == "another checkpoint" else {}
        compressor.load_state_dict(state | older)
    elif case == "another checkpoint":
        compressor.load_state_dict(state)
    with pytest.raises(RankMismatchError, match="the step: its number is"):
        train(model, optimizer, 1)
    restart(optimizer)


def test_a_collective_of_an_earlier_horovod_ends_the_generation():
    """One that is not this package's stands in for it. Elastic Horovod starts anew then."""
    name, one = f"left.{next(SEEDS)}", torch.ones(1)
    if hvd.rank() > 0:
        time.sleep(0.2)
    handle = hvd.allreduce_async(one, name=name, op=hvd.Sum)
    if hvd.rank() == 0:
        with pytest.raises(HorovodInternalError, match=rf"^{name}: .* since hvd.shutdown\(\)"):
            HorovodWorld().allreduce(one, name, hvd.Sum)
    assert hvd.synchronize(handle) == hvd.size()
