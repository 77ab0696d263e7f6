"""Two trainings of one process draw different random numbers, by each door (see tests/nets.py)."""

from __future__ import annotations

import pytest
import torch
from nets import Door, Gather, Given, is_same

from hvd_adaptive import ALQ, ECDQ, QCS, QSGD, Hierarchical, ScatterReduce

__all__ = ["test_trainings_draw_different_numbers"]
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


def errors_of(
    door: Door, gather: Gather, rank: int, compressors: list, steps: int
) -> list[torch.Tensor]:
    """Of averages of the same gradients by trainings that step in turn, one row a step each. Names
    and sizes of parameters are the same."""
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


def assert_independent(rows: list[torch.Tensor]) -> None:
    """Correlation of any two within five standard errors, which are 1/sqrt(N) where they are
    independent; 1 where they are the same."""
    found = torch.corrcoef(torch.stack(rows))
    off = found[~torch.eye(len(rows), dtype=torch.bool)]
    assert off.abs().max() < 5 / N**0.5, found


def numbers(compressors: list) -> list[int]:
    return [compressor._training.instance.number for compressor in compressors]


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_trainings_draw_different_numbers(
    door: Door, gather: Gather, rank: int, scheme: str, exchange: str
) -> None:
    compressors = [SCHEMES[scheme](**EXCHANGES[exchange]) for _ in range(2)]
    assert_independent(errors_of(door, gather, rank, compressors, 2))
    assert numbers(compressors) == [0, 1]
