"""QSVRG over Horovod: the same bits on every rank, and those of the run in one process."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from training import assert_same_everywhere

from hvd_adaptive.optim import QSVRG, HorovodRanks, Portion

pytestmark = pytest.mark.ranks

N = 20


def portion(rank: int) -> Portion:
    """Least squares over a rank's own rows; ranks hold different numbers of them."""
    generator = torch.Generator().manual_seed(rank)
    rows = torch.randn(10 + rank, N, generator=generator, dtype=torch.float64)
    rows /= rows.norm(dim=1, keepdim=True)
    wanted = torch.randn(10 + rank, generator=generator, dtype=torch.float64)

    def gradient(x: torch.Tensor, index: int | None) -> torch.Tensor:
        own = slice(None) if index is None else slice(index, index + 1)
        return rows[own].T @ (rows[own] @ x - wanted[own]) / rows[own].shape[0] + 0.3 * x

    return Portion(len(rows), gradient)


def test_ranks_compute_what_one_process_does():
    start, keywords = torch.zeros(N, dtype=torch.float64), {"lr": 0.1, "iterations": 15, "seed": 4}
    spread = QSVRG(start, [portion(hvd.rank())], ranks=HorovodRanks(), **keywords)
    alone = QSVRG(start, [portion(rank) for rank in range(hvd.size())], **keywords)
    for _ in range(3):
        assert torch.equal(spread.epoch(), alone.epoch())
        assert_same_everywhere(spread.point)
    assert spread.bits.payloads == alone.bits.payloads
    assert torch.count_nonzero(spread.point) == N
