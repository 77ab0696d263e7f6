"""What trainings share by each door (see tests/nets.py): warnings of replicas that differ, random
numbers, a monitor's comparison with stock exchanges."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from nets import Given, flat_parameters, is_same, make_net, train
from torch import nn

from hvd_adaptive import (
    ALQ,
    ECDQ,
    QCS,
    QSGD,
    Hierarchical,
    Monitor,
    ScatterReduce,
    Tuning,
    instances,
)

__all__ = [
    "errors",
    "test_replicas_after_a_state_was_loaded",
    "test_replicas_that_differ",
    "test_stock_exchanges_are_measured_once",
    "test_trainings_draw_different_numbers",
]
STEPS, DIFFERENT = 5, "ranks have different parameters"


def differing(net: nn.Module, rank: int, ranks: int, *names: str) -> None:
    """As if the last rank alone had loaded a checkpoint."""
    if rank == ranks - 1:
        with torch.no_grad():
            for name in names:
                net.get_parameter(name).view(-1)[5] += 1e-3


@pytest.mark.parametrize("worker", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_replicas_that_differ(door, rank, ranks, worker, frozen, said):
    """All ranks warn, once; the first one is named, be it frozen as those of LoRA's base."""
    net = make_net()
    net[2].requires_grad_(not frozen)
    training = door(net, QSGD(bits=4, tuning=Tuning(worker=worker)))
    differing(net, rank, ranks, "2.weight", *([] if frozen else ["6.bias"]))
    train(training, rank, range(3))
    (message,) = said(DIFFERENT)
    assert f"parameter 2.weight of rank {ranks - 1} differs from the first" in message
    assert ("and 1 more do" in message) != frozen
    assert "equal parameter names that some rank steps in another order" in message


@pytest.mark.parametrize("by", ["all ranks", "one rank"])
def test_replicas_after_a_state_was_loaded(door, rank, ranks, by, said):
    """By any rank, and with the same step; changed settings compare nothing again."""
    net, compressor = make_net(), QSGD(bits=4)
    training = door(net, compressor)
    train(training, rank, range(2))
    differing(net, rank, ranks, "0.weight")
    compressor.set(bits=5)
    train(training, rank, [2])
    assert not said(DIFFERENT)
    if by == "all ranks" or rank == ranks - 1:
        compressor.load_state_dict(compressor.state_dict())
    train(training, rank, [3, 4, 5])
    (message,) = said(DIFFERENT)
    assert "parameter 0.weight of" in message


N = 20_000
SCHEMES = {
    "qsgd": lambda **k: QSGD(bits=3, norm="linf", **k),
    "alq": lambda **k: ALQ(bits=3, update_steps=[0], **k),
    "qcs": lambda **k: QCS(gain=8.0, **k),
    "ecdq": lambda **k: ECDQ(relative_variance=0.3, **k),
}
EXCHANGES = {
    "allgather": {"exchange": "allgather"},
    "scatter_reduce": {"exchange": ScatterReduce(second_stage_bits=4)},
    "hierarchical": {"exchange": Hierarchical(ranks_per_node=1, second_stage_bits=4)},
}


@pytest.fixture
def errors(door, gather, rank):
    """Returns errors of averages of the same gradients by trainings that step in turn, one row a
    step each. Names and sizes of parameters are the same."""

    def errors(compressors: list, steps: int) -> list[torch.Tensor]:
        trainings = [door(Given([N]), compressor) for compressor in compressors]
        own, rows = torch.randn(N, generator=torch.Generator().manual_seed(rank)), []
        exact = gather(own).double().mean(0)
        for _ in range(steps):
            for training in trainings:
                training.optimizer.zero_grad()
                training.average(training.model([own]))
                (weight,) = training.model.parameters()
                assert is_same(gather, weight.grad)
                rows.append(weight.grad.double() - exact)
        return rows

    return errors


def assert_independent(rows: list[torch.Tensor]) -> None:
    """Correlation of any two within five standard errors, which are 1/sqrt(N) where they are
    independent; 1 where they are the same."""
    found = torch.corrcoef(torch.stack(rows))
    off = found[~torch.eye(len(rows), dtype=torch.bool)]
    assert off.abs().max() < 5 / N**0.5, found


def numbers(compressors: list) -> list[int]:
    return [compressor._training.instance.number for compressor in compressors]


@pytest.mark.ranks
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_trainings_draw_different_numbers(errors, scheme, exchange):
    compressors = [SCHEMES[scheme](**EXCHANGES[exchange]) for _ in range(2)]
    assert_independent(errors(compressors, 2))
    assert numbers(compressors) == [0, 1]


def test_stock_exchanges_are_measured_once(door, rank):
    """The start record has them; the training's bits stay the same; ``set`` measures nothing."""
    ends = []
    with TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        for monitor in (Monitor(log, every=1, compare=True), None):
            instances.start_over()
            net, compressor = make_net(), QSGD(bits=4, bucket_size=128, monitor=monitor)
            training = door(net, compressor)
            train(training, rank, range(STEPS))
            compressor.set(bits=5)
            train(training, rank, range(STEPS, 2 * STEPS))
            ends.append(flat_parameters(net))
            if monitor is not None:
                monitor.close()
        assert torch.equal(*ends)
        if rank:
            return
        lines = [json.loads(line) for line in log.read_text().splitlines()]
    first, *others = (line["stock"] for line in lines if line["kind"] == "start")
    assert sorted(first) == ["float16", "float32"] and all(s > 0 for s in first.values())
    assert others and all(other == first for other in others)
    timed = [line for line in lines if line["kind"] == "step" and line["step_s"] is not None]
    assert len(timed) >= 2 * (STEPS - 1) - 1
    for record in timed:
        assert 0 < record["blocked_s"] < record["step_s"]
        assert 0 < record["arrival_s"] < record["step_s"]
