"""Error feedback inside stock hvd.DistributedOptimizer."""

from __future__ import annotations

import time

import horovod.torch as hvd
import pytest
import torch
from conftest import (
    assert_same_everywhere,
    batches,
    flat_parameters,
    make_model,
    train,
    wait_for,
)
from feedback_doors import *  # noqa: F403
from feedback_doors import CASES, residuals_of
from rank_optimizers import distributed, give_up

from hvd_adaptive import QSGD, Tuning, instances
from hvd_adaptive.transport.horovod_world import HorovodWorld


def test_one_ranks_state_on_all_ranks(caplog):
    """Rank 0's checkpoint: the others start from zero and say so."""
    model, compressor = make_model(), CASES["alq"]()
    train(model, distributed(model, compressor), 2)
    state = hvd.broadcast_object(compressor.state_dict(), 0, name="state")
    new = CASES["alq"]()
    new.load_state_dict(state)
    model = make_model()
    train(model, distributed(model, new), 1)
    told = [m for m in caplog.messages if f"saved by rank 0 of {hvd.size()}" in m]
    assert len(told) == (hvd.rank() != 0)
    assert torch.equal(new.levels, compressor.levels) and new.step == 3
    assert_same_everywhere(flat_parameters(model), "one state")


def test_a_step_that_is_given_up_leaves_no_trace():
    """load_state_dict of the optimizer makes Horovod forget the gradients in flight."""

    def answered(grad):
        """Once all ranks are known to be there, the gradients to come launch their groups."""
        while not all(hvd.poll(handle) for handle, _ in optimizer._handles.values()):
            time.sleep(0.001)

    ends = []
    for torn in (False, True):
        instances.start_over()
        model, compressor = make_model(), CASES["qsgd"]()
        optimizer = distributed(model, compressor)
        train(model, optimizer, 2)
        before = residuals_of(compressor)
        x, y = batches(hvd.rank(), 9)()
        optimizer.zero_grad()
        hidden = model[0](x)
        hidden.register_hook(answered)
        torch.nn.functional.cross_entropy(model[1:](hidden), y).backward()
        if torn:
            sent = compressor._training.connection.drive.step.names
            wait_for(lambda sent=sent: sent)
            give_up(optimizer)
            for name, residual in residuals_of(compressor).items():
                assert torch.equal(before[name], residual)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        ends.append(residuals_of(compressor))
    assert compressor.step == 3
    for name, residual in ends[0].items():
        # The second attempt draws other numbers for the same z, so e differs, no more than that.
        difference = float((residual - ends[1][name]).square().sum())
        change = float((residual - before[name]).square().sum())
        assert 0 < difference < 4 * change
    assert_same_everywhere(flat_parameters(model), "torn")


def gathers(monkeypatch) -> list[str]:
    """Names of the collectives of equal tensors from now on."""
    names: list[str] = []
    gather = HorovodWorld.gather_equal

    def counted(self, values, name):
        names.append(name)
        return gather(self, values, name)

    monkeypatch.setattr(HorovodWorld, "gather_equal", counted)
    return names


@pytest.mark.parametrize("worker", (True, False))
def test_ranks_share_the_weights(worker, monkeypatch):
    """Though their gradients differ; and no collective is added to a step."""
    counts = []
    for feedback in (None, "auto"):
        model = make_model()
        compressor = QSGD(
            bits=2, bucket_size=64, error_feedback=feedback, tuning=Tuning(worker=worker)
        )
        optimizer = distributed(model, compressor)
        train(model, optimizer, 2)
        names = gathers(monkeypatch)
        weights = []
        for _ in range(3):
            train(model, optimizer, 1)
            if feedback:
                weights.append(compressor._training.residuals.weights.of(""))
        counts.append(len(names))
        monkeypatch.undo()
    assert counts[0] == counts[1] == 3
    assert all(0 < weight < 0.5 for weight in weights) and len(set(weights)) == 3
    assert_same_everywhere(torch.tensor(weights, dtype=torch.float64), f"weights.{worker}")
