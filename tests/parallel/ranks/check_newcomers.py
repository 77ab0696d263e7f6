"""Ranks that differ in the step: newcomers take the first rank's state, others are told."""

from __future__ import annotations

import itertools
import logging

import horovod.torch as hvd
import pytest
import torch
from conftest import assert_same_everywhere, batches, flat_parameters, make_model, train
from rank_optimizers import distributed, drain

from hvd_adaptive import ALQ, ECDQ, QSGD, RankMismatchError, ScatterReduce

SEEDS = itertools.count(9000)
SCHEMES = {
    "alq": lambda **k: ALQ(bits=7, norm="linf", bucket_size=512, update_steps=[0, 2, 4], **k),
    "alq-scatter": lambda **k: ALQ(
        bits=7, norm="linf", bucket_size=512, exchange=ScatterReduce(second_stage_bits=7), **k
    ),
    "alq-parts": lambda **k: ALQ(
        bits=7, norm="linf", bucket_size=512, parameter_bits={"0.*": 6}, **k
    ),
    "qsgd": lambda **k: QSGD(bits=8, norm="linf", bucket_size=512, **k),
    "ecdq": lambda **k: ECDQ(bits=6, bucket_size=512, **k),
}


def veteran(scheme: str, steps: int = 3, **keywords):
    """The state of a compressor that all ranks have trained with."""
    model, compressor = make_model(), SCHEMES[scheme](seed=next(SEEDS), **keywords)
    train(model, distributed(model, compressor), steps)
    return compressor.state_dict(), compressor.parts.default.table_version


@pytest.mark.ranks
@pytest.mark.parametrize("feedback", [None, 0.5], ids=["plain", "feedback"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_newcomers_take_the_first_ranks_state(scheme, feedback, caplog):
    """The averages of that very step are right, whether or not it is one at which tables are fitted
    for the first rank (step 4) or the newcomers (step 0)."""
    keywords = {"error_feedback": feedback} if scheme != "ecdq" else {}
    for steps in (3, 4) if scheme == "alq" else (3,):
        state, version = veteran(scheme, steps, **keywords)
        model, compressor = make_model(7), SCHEMES[scheme](seed=1, **keywords)
        if hvd.rank() == 0:
            compressor.load_state_dict(state)
        optimizer = distributed(model, compressor)
        caplog.clear()
        with caplog.at_level(logging.INFO, "hvd_adaptive"):
            for _ in range(2):
                x, y = batches(hvd.rank())()
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                own = [p.grad.clone() for p in model.parameters()]
                optimizer.synchronize()
                for index, (gradient, p) in enumerate(zip(own, model.parameters(), strict=True)):
                    exact = hvd.allreduce(gradient.double(), name=f"exact.{index}")
                    error = (p.grad.double() - exact).norm() / exact.norm()
                    assert error < 0.05 or feedback is not None, (scheme, index, float(error))
                with optimizer.skip_synchronize():
                    optimizer.step()
        assert compressor.step == steps + 2
        assert compressor.parts.default.table_version >= version
        told = [r for r in caplog.records if "go on from the first rank's step" in r.message]
        assert len(told) == 1
        assert (told[0].levelno == logging.WARNING) is (hvd.rank() != 0)
        assert_same_everywhere(flat_parameters(model), f"newcomers.{scheme}")
        tables = hvd.allgather_object(
            [repr(codec.tables_state().get("table")) for codec in compressor.parts.values()]
        )
        assert all(table == tables[0] for table in tables)


def test_residuals_start_from_zero_and_the_first_ranks_stay():
    state, _ = veteran("qsgd", error_feedback=1.0)
    model, compressor = make_model(), SCHEMES["qsgd"](error_feedback=1.0, seed=3)
    if hvd.rank() == 0:
        compressor.load_state_dict(state)
    optimizer = distributed(model, compressor, lr=0.0)
    optimizer.zero_grad()
    # Gradients of zero send the residuals alone.
    (sum(p.sum() for p in model.parameters()) * 0.0).backward()
    optimizer.synchronize()
    residuals = state["residuals"]["parameters"] if hvd.rank() == 0 else {}
    residuals = hvd.broadcast_object(residuals, 0, name="check.residuals")
    for name, parameter in model.named_parameters():
        sent = residuals.get(name, torch.zeros(parameter.numel())) / hvd.size()
        error = (parameter.grad.view(-1) - sent).norm()
        assert error <= 0.05 * sent.norm(), (name, float(error), float(sent.norm()))
    assert any(bool(residual.any()) for residual in residuals.values())


def test_newcomers_take_the_weights_of_error_feedback():
    state, _ = veteran("qsgd", error_feedback="auto")
    for residual in state["residuals"]["parameters"].values():
        residual.zero_()
    del state["residuals_checksum"]
    model, compressor = make_model(), SCHEMES["qsgd"](error_feedback="auto", seed=3)
    if hvd.rank() == 0:
        compressor.load_state_dict(state)
    optimizer = distributed(model, compressor, lr=0.0)
    optimizer.zero_grad()
    # Gradients of zero and no residuals: nothing is measured, so the weights stay.
    (sum(p.sum() for p in model.parameters()) * 0.0).backward()
    optimizer.synchronize()
    expected = hvd.broadcast_object(state["feedback_weights"], 0, name="check.weights")
    assert compressor._training.residuals.weights.adapted == expected != {}


@pytest.mark.parametrize(
    "case", ["a checkpoint on rank 1 alone", "another checkpoint", "a step more"]
)
def test_other_differences_are_errors(case):
    state, _ = veteran("alq")
    older = dict(state) | {"step": 2}
    model, compressor = make_model(), SCHEMES["alq"](seed=3)
    own = {
        "a checkpoint on rank 1 alone": {1: state},
        "another checkpoint": {0: state, 1: older},
        "a step more": {},
    }[case]
    if hvd.rank() in own:
        compressor.load_state_dict(own[hvd.rank()])
    optimizer = distributed(model, compressor)
    if case == "a step more":
        train(model, optimizer, 2)
        compressor.step += hvd.rank() == 1
    if case == "another checkpoint" and hvd.rank() > 1:
        compressor.load_state_dict(state)
    with pytest.raises(RankMismatchError, match="the step: its number is"):
        train(model, optimizer, 1)
    drain(optimizer)
