"""LocalSGD in fragments under schedules that chance picks: ranks, their workers and the threads of
delayed rounds. No rank waits for ever, and every schedule gives the parameters of a simulation."""

from __future__ import annotations

import functools
import os
import random

import pytest
import torch
from scheduler import (
    DeadlockError,
    Network,
    OrderedWorld,
    OrderError,
    Schedule,
    ScheduledLock,
    ScheduledWorker,
    explore,
    first_failure,
)

from hvd_adaptive import LocalSGD, SparseSGD, local_sgd
from hvd_adaptive.hooks.rounds import Background

SCHEDULES = int(os.environ.get("HVD_ADAPTIVE_SCHEDULES", "160")) // 20
SIZES, FRAGMENTS, EVERY, DELAY, STEPS = (24, 40, 60), 3, 6, 2, 14
# Binary fractions, and data in whole numbers: sums are exact, and means of two ranks.
MOMENTUM, RATE, MIXING = 0.5, 0.5, 0.5


def moves(rank: int, step: int) -> list[torch.Tensor]:
    """How a rank's parameters move in a step."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    return [torch.randint(-4, 5, (n,), generator=generator).double() for n in SIZES]


def simulated(ranks: int, steps: int) -> list[torch.Tensor]:
    """The parameters of all ranks in the end, by hand: a fragment is one parameter."""
    own = [[torch.zeros(n, dtype=torch.float64) for n in SIZES] for _ in range(ranks)]
    shared = [torch.zeros(n, dtype=torch.float64) for n in SIZES]
    buffers = [torch.zeros(n, dtype=torch.float64) for n in SIZES]

    def move(fragment: int, way: torch.Tensor) -> None:
        buffers[fragment] = MOMENTUM * buffers[fragment] + way
        shared[fragment] = shared[fragment] - RATE * (way + MOMENTUM * buffers[fragment])

    flies = None
    for step in range(1, steps + 1):
        for rank in range(ranks):
            for values, by in zip(own[rank], moves(rank, step), strict=True):
                values.sub_(by)
        if flies is not None and flies[0] == step:
            _, fragment, way = flies
            flies = None
            move(fragment, way)
            for values in own:
                values[fragment] = MIXING * values[fragment] + (1 - MIXING) * shared[fragment]
        if step % 2 == 0:
            fragment = (step // 2 - 1) % FRAGMENTS
            way = sum(shared[fragment] - values[fragment] for values in own) / ranks
            flies = step + DELAY, fragment, way
    if flies is not None:
        move(flies[1], flies[2])
        for values in own:
            values[flies[1]] = MIXING * values[flies[1]] + (1 - MIXING) * shared[flies[1]]
    for turn in range(steps // 2, steps // 2 + FRAGMENTS):
        fragment = turn % FRAGMENTS
        move(fragment, sum(shared[fragment] - values[fragment] for values in own) / ranks)
    return shared


class ScheduledBackground(Background):
    """A task of the schedule in place of a thread."""

    schedule: Schedule

    def _begin(self, name: str) -> None:
        self.has_ended = False
        self.schedule.add(name, self._work_on, serves=True)

    def _work_on(self) -> None:
        self.schedule.pause()
        try:
            self._run()
        finally:
            self.has_ended = True

    def exception(self, timeout=None):
        self.schedule.pause("a round", lambda: self.has_ended)
        return super().exception(timeout)

    def result(self, timeout=None):
        self.exception()
        return super().result(timeout)


class Rank:
    """A rank's program."""

    def __init__(self, schedule: Schedule, network: Network, number: int) -> None:
        self.number, self.schedule = number, schedule
        # A sparse code of density 1 loses nothing.
        compressor = SparseSGD(density=1.0, bucket_size=16, min_numel=1, exchange="allgather")
        compressor._training.instance.training = 0  # as in a process of its own
        self.parameters = [torch.nn.Parameter(torch.zeros(n, dtype=torch.float64)) for n in SIZES]
        world = OrderedWorld(schedule, network, number)
        found, local_sgd.find_world = local_sgd.find_world, lambda *_: world
        try:
            self.optimizer = LocalSGD(
                torch.optim.SGD(self.parameters, lr=1.0),
                every=EVERY,
                fragments=FRAGMENTS,
                delay=DELAY,
                mixing=MIXING,
                momentum=MOMENTUM,
                lr=RATE,
                compression=compressor,
            )
        finally:
            local_sgd.find_world = found
        driver = self.optimizer._exchange._session._driver
        driver.make_lock = functools.partial(ScheduledLock, schedule)
        driver._worker = ScheduledWorker(
            schedule, network, lambda: driver.drive, f"worker {number}"
        )
        schedule.add(f"rank {number}", self.run)

    def run(self) -> None:
        slow = random.Random(self.number)
        for step in range(1, STEPS + 1):
            for _ in range(slow.choice([1, 40])):  # others overtake it, or it them
                self.schedule.pause()
            for parameter, by in zip(self.parameters, moves(self.number, step), strict=True):
                parameter.grad = by
            self.optimizer.step()
        self.optimizer.finish()


def check(rng: random.Random) -> None:
    """One schedule: parameters are those of the simulation, and equal on all ranks.

    Of two ranks every bit is the simulation's. A mean of three is no binary fraction, and payloads
    round it to float32.
    """
    ranks = rng.choice([2, 3])
    schedule = Schedule(rng.choice)
    network = Network(ranks, lambda number, sender, receiver, part: part)
    schedule.events = network.events
    background = local_sgd.Background
    local_sgd.Background = type("Here", (ScheduledBackground,), {"schedule": schedule})
    try:
        everyone = [Rank(schedule, network, number) for number in range(ranks)]
        schedule.run()
    finally:
        local_sgd.Background = background
    exact, tolerance = simulated(ranks, STEPS), 0.0 if ranks == 2 else 1e-6
    for rank in everyone:
        for parameter, other in zip(rank.parameters, exact, strict=True):
            torch.testing.assert_close(parameter.detach(), other, rtol=tolerance, atol=tolerance)
        for parameter, first in zip(rank.parameters, everyone[0].parameters, strict=True):
            assert torch.equal(parameter, first)


def test_any_schedule_of_streaming():
    explore(check, range(SCHEDULES))


def test_a_round_that_reads_moving_parameters_is_found(monkeypatch):
    """A delayed round that reads the parameters when it is sent."""
    from hvd_adaptive.hooks import local_round

    made = local_round.Round.__init__

    def late(self, exchange, fragment, parameters, anchors, position):
        made(self, exchange, fragment, parameters, anchors, position)
        self._ways = _Late(anchors, self._ways)

    class _Late(dict):
        def __init__(self, anchors, ways):
            super().__init__(ways)
            self._anchors = anchors

        def __getitem__(self, parameter):
            return self._anchors.way(parameter)

    monkeypatch.setattr(local_round.Round, "__init__", late)
    assert first_failure(check, AssertionError, range(20)) is not None


def test_a_round_that_is_applied_early_is_found(monkeypatch):
    """Ranks that apply a round when its average is there, and not when it is due."""
    count = LocalSGD._count

    def early(self):
        if self._pending is not None and self._pending._result.has_ended:
            self._complete()
        count(self)

    monkeypatch.setattr(LocalSGD, "_count", early)
    assert first_failure(check, AssertionError, range(20)) is not None


def test_two_rounds_in_flight_are_found(monkeypatch):
    """A round that begins before the last one was applied: collectives are mixed up."""
    monkeypatch.setattr(LocalSGD, "_complete", lambda self: None)
    with pytest.raises((OrderError, DeadlockError, AssertionError, RuntimeError)):
        for seed in range(20):
            check(random.Random(seed))
