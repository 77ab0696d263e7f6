"""Two optimizers of one process draw different random numbers, whatever other ranks count."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from conftest import assert_same_everywhere

from hvd_adaptive import ALQ, ECDQ, QCS, QSGD, Hierarchical, ScatterReduce, instances

pytestmark = pytest.mark.ranks

N = 20_000
SCHEMES = {
    "qsgd": lambda **k: QSGD(bits=3, norm="linf", **k),
    "alq": lambda **k: ALQ(bits=3, update_steps=[0], **k),
    "qcs": lambda **k: QCS(gain=8.0, **k),
    "ecdq": lambda **k: ECDQ(relative_variance=0.3, **k),
}
EXCHANGES = {
    "allgather": {},
    "scatter_reduce": {"exchange": ScatterReduce(second_stage_bits=4)},
    "hierarchical": {"exchange": Hierarchical(ranks_per_node=1, second_stage_bits=4)},
}


def values(rank: int) -> torch.Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(rank))


def errors_of(compressors: list, steps: int) -> list[torch.Tensor]:
    """Of averages of the same gradients by optimizers that step in turn, one row a step each."""
    weights = [torch.nn.Parameter(torch.zeros(N)) for _ in compressors]
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=0.0),
            named_parameters=[(f"model{place}.weight", weight)],
            compression=compressor,
        )
        for place, (weight, compressor) in enumerate(zip(weights, compressors, strict=True))
    ]
    exact = torch.stack([values(rank) for rank in range(hvd.size())]).double().mean(0)
    rows = []
    for _ in range(steps):
        for weight, optimizer in zip(weights, optimizers, strict=True):
            optimizer.zero_grad()
            (weight * values(hvd.rank())).sum().backward()
            optimizer.step()
            assert_same_everywhere(weight.grad, f"streams.{len(rows)}")
            rows.append(weight.grad.double() - exact)
    return rows


def assert_independent(rows: list[torch.Tensor]) -> None:
    """Correlation of any two within five standard errors, which are 1/sqrt(N) where they are
    independent; 1 where they are the same."""
    found = torch.corrcoef(torch.stack(rows))
    off = found[~torch.eye(len(rows), dtype=torch.bool)]
    assert off.abs().max() < 5 / N**0.5, found


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_optimizers_draw_different_numbers(scheme, exchange):
    assert_independent(errors_of([SCHEMES[scheme](**EXCHANGES[exchange]) for _ in range(2)], 2))


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_ranks_that_count_differently_understand_each_other(exchange):
    """A rank that has trained with more compressors, alone, has other numbers."""
    for _ in range(3 * hvd.rank()):
        QSGD()._training.instance.bind()
    compressors = [SCHEMES["qcs"](**EXCHANGES[exchange]) for _ in range(2)]
    assert_independent(errors_of(compressors, 2))
    assert [c._training.instance.training for c in compressors] == [
        3 * hvd.rank(),
        3 * hvd.rank() + 1,
    ]


def test_what_is_built_beside_does_not_count():
    """One that logs on a single rank; parts, second stages and fitted copies on all."""
    if hvd.rank() == 0:
        QSGD().encode(values(0))
    compressor = ALQ(bits=3, parameter_bits={"a": 4}, exchange="scatter_reduce")
    errors_of([compressor], 1)
    compressor.set(bits=4)
    assert compressor._training.instance.training == 0
    compressors = [QSGD(bits=3) for _ in range(2)]
    errors_of(compressors, 1)
    assert [c._training.instance.training for c in compressors] == [1, 2]


def test_a_resumed_run_of_two_optimizers_repeats():
    """States of both, loaded in another order and beside a new compressor."""
    kept = []
    for resumed in (False, True):
        instances.start_over()
        compressors = [QSGD(bits=3) for _ in range(2)]
        errors_of(compressors, 1)
        if resumed:
            saved = [compressor.state_dict() for compressor in compressors]
            instances.start_over()
            compressors = [QSGD(bits=3) for _ in range(2)]
            for place in (1, 0):
                compressors[place].load_state_dict(saved[place])
        kept.append(torch.stack(errors_of(compressors, 2)))
        if resumed:
            new = QSGD(bits=3)
            errors_of([new], 1)
            assert new._training.instance.training == 2
    assert torch.equal(*kept)
