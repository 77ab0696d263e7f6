"""Who takes the first rank's state, without Horovod."""

from __future__ import annotations

import logging
import random

import pytest
import torch
from named_ranks import NamedNetwork, NamedWorld, Optimizer, run_ranks
from scheduler import Schedule

from hvd_adaptive import ALQ, RankMismatchError
from hvd_adaptive.hooks.horovod.elastic import take_first_state
from hvd_adaptive.hooks.horovod.placeholder import Reduction, StepsDiffer, check_reduced, position


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
    """rows: each rank's step, fits of tables, attempt, and whether it may take a state."""
    own = [trained(step, fits) for step, fits, *_ in rows]
    before, answers = [compressor.levels for compressor in own], []

    def program(world: NamedWorld) -> None:
        world.process_set.ranks = [10, 11, 12]
        step, _, attempt, may_take = rows[world.rank]
        survives = bool(may_take and step)
        answers.append(take_first_state(world, own[world.rank], "n", attempt, survives))

    with caplog.at_level(logging.INFO, "hvd_adaptive"):
        network = run_ranks(3, program)
    alike = takers is not None
    assert answers == [alike] * 3 and len(caplog.records) == 3 * alike
    if alike:
        sizes = [network.sent[-1][rank][1][0].numel() for rank in range(3)]
        assert sizes[0] > 0 and not any(sizes[1:]), "the first rank alone sends its state"
        assert str([10 + taker for taker in takers]) in caplog.text
    for rank, compressor in enumerate(own):
        source = 0 if alike and rank in takers else rank
        assert compressor.step == rows[source][0]
        assert compressor.parts.default.table_version == rows[source][1]
        assert torch.equal(compressor.levels, before[source])


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


def test_a_step_of_an_earlier_horovod_ends():
    """Another collective may have any handle of its own by now."""
    schedule = Schedule(random.Random(0).choice)
    network = NamedNetwork(2, lambda number, sender, receiver, part: part, direct=False)
    schedule.events = network.events
    answers = []

    def program() -> None:
        optimizer = Optimizer(
            schedule, network, 0, "net", [64], trained(0, 0), "Average", torch.float32
        )
        optimizer.begin()
        drive = optimizer.driver.drive
        drive.advance()
        answers.append(drive.error)
        optimizer.world.hvd.mpi_ops._handle_map = {}
        drive.advance()
        answers.append(drive.error)

    schedule.add("rank 0", program)
    schedule.run()
    assert answers[0] is None and "was given up" in str(answers[1])
