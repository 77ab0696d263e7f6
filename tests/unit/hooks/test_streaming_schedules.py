"""LocalSGD in fragments under schedules that chance picks: ranks, their workers and the threads of
delayed rounds. No rank waits for ever, and every schedule gives the parameters of a simulation."""

from __future__ import annotations

import functools
import os
import random
from unittest import mock

from scheduler import Network, OrderedWorld, Schedule, explore, first_failure, work_in_schedule
from streaming_simulation import Streaming, assert_equal, backward, make_net, make_optimizer

from hvd_adaptive import LocalSGD, SparseSGD, instances, local_sgd
from hvd_adaptive.hooks.rounds import Background

SCHEDULES = int(os.environ.get("HVD_ADAPTIVE_SCHEDULES", "160")) // 20
STEPS, STARTS = 14, (2, 4, 6)
KEYWORDS = {"every": 6, "fragments": 3, "delay": 2, "mixing": 0.5, "momentum": 0.5, "lr": 0.5}


def make_compressor() -> SparseSGD:
    """Its code of density 1 loses nothing."""
    return SparseSGD(density=1.0, bucket_size=512, min_numel=1, exchange="allgather")


@functools.cache
def simulated(ranks: int) -> Streaming:
    """All ranks' parameters after each step."""
    instances.start_over()
    found = Streaming([STEPS] * ranks, STARTS, **KEYWORDS, compressor=make_compressor())
    found.run()
    return found


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
    def __init__(self, schedule: Schedule, network: Network, number: int) -> None:
        self.number, self.schedule, self.exact = number, schedule, simulated(network.size)
        compressor = make_compressor()
        compressor._training.instance.number = 0  # as in a process of its own
        self.net = make_net()
        world = OrderedWorld(schedule, network, number)
        with mock.patch.object(local_sgd, "find_world", lambda *_: world):
            self.optimizer = LocalSGD(make_optimizer(self.net), **KEYWORDS, compression=compressor)
        driver = self.optimizer._exchange.session._driver
        work_in_schedule(driver, schedule, network, f"worker {number}")
        schedule.add(f"rank {number}", self.run)

    def run(self) -> None:
        slow = random.Random(self.number)
        for step in range(1, STEPS + 1):
            for _ in range(slow.choice([1, 40])):  # others overtake it, or it them
                self.schedule.pause()
            backward(self.net, self.number, step)
            self.optimizer.step()
            assert_equal(self.net, self.exact.history[step, self.number])
        self.optimizer.finish()


def check(rng: random.Random) -> None:
    """One schedule: every bit is the simulation's."""
    ranks = rng.choice([2, 3])
    schedule = Schedule(rng.choice)
    network = Network(ranks, lambda number, sender, receiver, part: part)
    schedule.events = network.events
    background = type("Here", (ScheduledBackground,), {"schedule": schedule})
    with mock.patch.object(local_sgd, "Background", background):
        everyone = [Rank(schedule, network, number) for number in range(ranks)]
        schedule.run()
    for rank, exact in zip(everyone, everyone[0].exact.ranks, strict=True):
        assert_equal(rank.net, list(exact.net.parameters()))


def test_any_schedule_of_streaming():
    explore(check, range(SCHEDULES))


def test_a_round_that_is_applied_early_is_found(monkeypatch):
    """Ranks that apply a round when its average is there, and not when it is due."""
    count = LocalSGD._count

    def early(self):
        if self._pending is not None and self._pending._result.has_ended:
            self._complete()
        count(self)

    monkeypatch.setattr(LocalSGD, "_count", early)
    assert first_failure(check, AssertionError, range(20)) is not None
