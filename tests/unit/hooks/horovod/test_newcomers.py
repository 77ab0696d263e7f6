"""Who takes the first rank's state, without Horovod."""

from __future__ import annotations

import io
import logging
from types import SimpleNamespace

import pytest
import torch

from hvd_adaptive import ALQ, RankMismatchError
from hvd_adaptive.hooks.horovod.elastic import take_first_state, without_own
from hvd_adaptive.hooks.horovod.placeholder import Reduction, StepsDiffer, check_reduced, position


class World:
    """Rank ``rank`` of ranks that tell ``rows``; the first one's state is that of ``first``."""

    def __init__(self, rank: int, rows, first: ALQ) -> None:
        self.rank, self.size, self.rows, self.first = rank, len(rows), rows, first
        self.process_set = SimpleNamespace(ranks=[10 + i for i in range(len(rows))])
        self.sent = 0

    def gather_equal(self, own, name):
        assert own.tolist() == self.rows[self.rank]
        return torch.tensor(self.rows)

    def allgather(self, data, name):
        self.sent = data.numel()
        file = io.BytesIO()
        torch.save(without_own(self.first.state_dict()), file)
        return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)

    def wait(self, handle, name):
        return handle


def trained(step: int, fits: int) -> ALQ:
    compressor = ALQ(bucket_size=64)
    for number in range(fits):
        seed = 10 * step + number
        compressor.fit(torch.randn(640, generator=torch.Generator().manual_seed(seed)))
    compressor.step = step
    return compressor


@pytest.mark.parametrize(
    ("rows", "takers"),
    [
        ([[7, 1, 0, 0], [7, 1, 0, 0], [0, 1, 0, 1]], [2]),
        ([[7, 1, 0, 1], [6, 1, 0, 1], [7, 1, 0, 1]], [1]),  # survivors of a crash
        ([[7, 1, 0, 1], [7, 2, 0, 1], [7, 1, 0, 1]], [1]),  # in the middle of a fit
        ([[7, 2, 1, 0], [7, 1, 1, 0], [7, 2, 1, 0]], [1]),  # given up in the middle of a fit
        ([[0, 1, 0, 1], [6, 1, 0, 1], [6, 1, 0, 1]], [1, 2]),
        ([[7, 1, 0, 0], [6, 1, 0, 0], [0, 1, 0, 1]], None),
        ([[7, 1, 1, 0], [6, 1, 1, 0], [7, 1, 1, 0]], None),
        ([[0, 1, 0, 1], [7, 1, 0, 0], [0, 1, 0, 1]], None),  # a checkpoint on that rank alone
        ([[7, 1, 0, 0], [0, 1, 1, 1], [7, 1, 0, 0]], None),  # another attempt
        ([[7, 1, 0, 0], [7, 1, 0, 0], [7, 1, 0, 0]], None),  # they differ in the schedule
        ([[7, 1, 0, 0], [7, 2, 0, 0], [7, 1, 0, 0]], None),  # one was fitted by itself
    ],
)
def test_who_takes_it(rows, takers, caplog):
    first = trained(*rows[0][:2])
    for rank, (step, fits, attempt, may_take) in enumerate(rows):
        own = first if rank == 0 else trained(step, fits)
        before = own.levels
        world = World(rank, rows, first)
        caplog.clear()
        with caplog.at_level(logging.INFO, "hvd_adaptive"):
            alike = take_first_state(world, own, "n", attempt, bool(may_take and step))
        assert alike is (takers is not None)
        assert (world.sent > 0) is (alike and rank == 0)
        assert len(caplog.records) == alike
        if takers and rank in takers:
            assert own.step == first.step and torch.equal(own.levels, first.levels)
            assert own.parts.default.table_version == first.parts.default.table_version
            assert str([10 + taker for taker in takers]) in caplog.text
        else:
            assert own.step == step and torch.equal(own.levels, before)


def summed(*ranks) -> torch.Tensor:
    return sum(position(rank, **own) for rank, own in enumerate(ranks))


@pytest.mark.parametrize(
    "odd",
    [{"step": 9}, {"progress": 1}, {"step": 0, "progress": 3}],
    ids=["step", "progress", "both"],
)
def test_positions_that_differ_in_the_step_alone(odd):
    own = {"slot": 4, "step": 5, "fingerprint": 2**31 + 7, "progress": 0}
    reduced = summed(own, own | odd, own)
    with pytest.raises(StepsDiffer) as caught:
        check_reduced(reduced, 3)
    assert caught.value.read == Reduction(1.0, 3)
    assert check_reduced(reduced, 3, any_step=True) == Reduction(1.0, 3)
    for more in ({"fingerprint": 2**31 + 6}, {"slot": 5}):
        with pytest.raises(RankMismatchError) as caught:
            check_reduced(summed(own, own | odd | more, own), 3, any_step=True)
        assert not isinstance(caught.value, StepsDiffer)
