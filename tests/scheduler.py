"""Ranks, their workers and their network in one process: chance picks who goes on.

Tasks are threads of which one runs at a time. A task stops where a rank would wait, or could be
overtaken: at each collective, each look at one, each wait for a worker. The schedule then picks the
next task, or a collective that ends on one rank. So a run repeats with the same choices, and
nothing can go on means that the ranks would wait for ever.
"""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hvd_adaptive.transport.world import World


class DeadlockError(Exception):
    """Nothing can go on; the message says what each task waits for."""


class OrderError(AssertionError):
    """Ranks submitted different collectives at the same place."""


class _Ended(BaseException):
    """Ends a task's thread after the run."""


def _closed_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclass(eq=False)
class Task:
    """name: for messages.  serves: it need not end, as a worker.  go: open when it is its turn."""

    name: str
    serves: bool
    go: threading.Lock = field(default_factory=_closed_lock)
    ready: Callable[[], bool] = lambda: True
    waits_for: str = "its turn"
    alive: bool = True
    error: BaseException | None = None


class Schedule:
    """Runs tasks until those that do not serve have ended.

    choose: picks an element of a list.
    """

    def __init__(self, choose: Callable[[list], Any]) -> None:
        self.choose, self._tasks, self._ended = choose, [], _closed_lock()
        self.current: Task | None = None
        self._over = False
        self._error: BaseException | None = None
        self.events: Callable[[], list[Callable[[], None]]] = list

    def add(self, name: str, work: Callable[[], None], serves: bool = False) -> Task:
        """A new task."""
        task = Task(name, serves)

        def run() -> None:
            task.go.acquire()
            try:
                if not self._over:
                    work()
            except _Ended:
                pass
            except BaseException as error:
                task.error = error
            task.alive = False
            self._hand_over()

        threading.Thread(target=run, daemon=True).start()
        self._tasks.append(task)
        return task

    def pause(self, waits_for: str = "its turn", ready: Callable[[], bool] = lambda: True) -> None:
        """The running task goes on later, when ``ready()``."""
        task = self.current
        task.ready, task.waits_for = ready, waits_for
        if not self._over and not self._hand_over(task):
            task.go.acquire()
        if self._over:
            raise _Ended

    def run(self) -> None:
        """Until all is done; raise the first error of a task."""
        self._hand_over()
        self._ended.acquire()
        self._over = True  # what a task does from now on is no part of the run
        for task in self._tasks:
            if task.alive:
                self.current = task
                task.go.release()
                self._ended.acquire()
        if failed := self._error or next((t.error for t in self._tasks if t.error), None):
            raise failed

    def _hand_over(self, running: Task | None = None) -> bool:
        """Choose who goes on, in the thread that stops: is it the same task?"""
        following = None
        if not self._over:
            try:
                following = self._next()
            except BaseException as error:
                self._error = error
        if following is None:
            self._ended.release()
            return False
        self.current = following
        if following is not running:
            following.go.release()
        return following is running

    def _next(self) -> Task | None:
        """The task that goes on; None if all is done."""
        while any(task.alive and not task.serves for task in self._tasks):
            able: list[Any] = [t for t in self._tasks if t.alive and t.ready()]
            able += self.events()
            if failed := next((t.error for t in self._tasks if t.error is not None), None):
                raise failed
            if not able:
                waiting = [f"{t.name} waits for {t.waits_for}" for t in self._tasks if t.alive]
                raise DeadlockError("; ".join(waiting))
            chosen = self.choose(able)
            if isinstance(chosen, Task):
                return chosen
            chosen()
        return None


class Network:
    """Pairs the ranks' collectives by their order, as torch.distributed does.

    damage: changes a message: (number of the collective, sender, receiver, bytes) -> bytes.
    """

    def __init__(self, size: int, damage: Callable[..., torch.Tensor]) -> None:
        self.size, self.damage = size, damage
        self.sent: list[dict[int, tuple[str, list[torch.Tensor]]]] = []
        self._counts = [0] * size
        self._ended: set[tuple[int, int]] = set()
        self._open: list[tuple[int, int]] = []  # number and rank of what all ranks have submitted
        self.dead: set[int] = set()
        self.version = 0

    def post(self, rank: int, kind: str, parts: list[torch.Tensor]) -> int:
        """Submit a collective, and return its number."""
        self._counts[rank] += 1
        return self._submit(self._counts[rank] - 1, rank, kind, parts)

    def _submit(self, number: int, rank: int, kind: str, parts: list[torch.Tensor]) -> int:
        if number == len(self.sent):
            self.sent.append({})
        for other, (theirs, _) in self.sent[number].items():
            if theirs != kind:
                raise OrderError(f"collective {number}: {kind!r} on {rank}, {theirs!r} on {other}")
        self.sent[number][rank] = kind, parts
        if len(self.sent[number]) == self.size:
            self._open += [(number, other) for other in range(self.size)]
        self.version += 1
        return number

    def has_ended(self, number: int, rank: int) -> bool:
        return (number, rank) in self._ended or self.is_hopeless(number)

    def is_hopeless(self, number: int) -> bool:
        """A rank died before it submitted this collective."""
        return any(rank not in self.sent[number] for rank in self.dead)

    def events(self) -> list[Callable[[], None]]:
        """Collectives that may end on a rank."""
        return [functools.partial(self._end, at) for at in self._open]

    def _end(self, at: tuple[int, int]) -> None:
        self._open.remove(at)
        self._ended.add(at)
        self.version += 1

    def received(self, number: int, rank: int) -> list[torch.Tensor]:
        """What each rank sent to this one."""
        if (number, rank) not in self._ended:
            raise RuntimeError("connection closed by a rank that died")
        return [
            self.damage(number, sender, rank, self.sent[number][sender][1][rank].clone())
            for sender in range(self.size)
        ]


class OrderedWorld(World):
    """One rank of the network."""

    def __init__(self, schedule: Schedule, network: Network, rank: int) -> None:
        self.schedule, self.network, self.rank = schedule, network, rank
        self.size = network.size

    def is_current(self):
        return True

    def node(self):
        return self.rank, 1

    def forget_lengths(self):
        """Messages may have any length."""

    def allgather(self, data, name):
        return self._post(f"gather {name}", [data] * self.size), True

    def alltoall(self, data, splits, name):
        return self._post(f"alltoall {name}", list(data.split(splits.tolist()))), False

    def poll(self, handle):
        self.schedule.pause("its turn after a look")
        return self.network.has_ended(handle[0], self.rank)

    def synchronize(self, handle):
        number, gathers = handle
        parts = self._wait(number, "a collective")
        splits = torch.tensor([part.numel() for part in parts], dtype=torch.int32)
        return torch.cat(parts) if gathers else (torch.cat(parts), splits)

    def gather_equal(self, values, name):
        return torch.stack(self._wait(self._post(f"equal {name}", [values] * self.size), name))

    def begin_gather(self, values):
        return self._post("position", [values] * self.size)

    def is_gathered(self, begun):
        self.schedule.pause("its turn after a look")
        return self.network.has_ended(begun, self.rank)

    def end_gather(self, begun):
        return torch.stack(self._wait(begun, "positions"))

    def gather_objects(self, own):
        self.gather_equal(torch.zeros(1), "objects")
        return [own] * self.size

    def broadcast(self, values: np.ndarray, name: str) -> np.ndarray:
        data = torch.from_numpy(values.view(np.uint8).copy())
        number = self._post(f"broadcast {name}", [data] * self.size)
        return self._wait(number, name)[0].numpy().view(values.dtype)

    def _post(self, kind, parts):
        number = self.network.post(self.rank, kind, parts)
        self.schedule.pause()
        return number

    def _wait(self, number, name):
        self.schedule.pause(f"{name} ({number})", lambda: self.network.has_ended(number, self.rank))
        return self.network.received(number, self.rank)


class ScheduledLock:
    """A lock that the running task may have to wait for."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, self._owner, self._depth = schedule, None, 0

    def __enter__(self) -> None:
        me = self._schedule.current
        if self._owner not in (None, me):
            self._schedule.pause("a lock", lambda: self._owner is None)
        self._owner, self._depth = me, self._depth + 1

    def __exit__(self, *error: Any) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None


class ScheduledWorker:
    """Stands in for the driver's Worker: a task that looks for work when it is woken, or polls."""

    def __init__(self, schedule: Schedule, network: Network, find: Callable, name: str) -> None:
        self._schedule, self._network, self._find = schedule, network, find
        self._woken, self._polls, self._seen = False, False, -1
        schedule.add(name, self._run, serves=True)

    def wake(self) -> None:
        self._woken = True

    def wait_for(self, event, is_late) -> None:
        self.wake()
        self._schedule.pause("its worker", event.is_set)

    def stop(self) -> None:
        """It ends with the schedule."""

    def _run(self) -> None:
        while True:
            self._schedule.pause("work", self._has_work)
            self._woken, self._seen = False, self._network.version
            work = self._find()
            done = None if work is None else work.advance()
            self._polls = done is not None
            self._woken = self._woken or bool(done)  # there may be more to do

    def _has_work(self) -> bool:
        return self._woken or (self._polls and self._network.version != self._seen)


def work_in_schedule(driver: Any, schedule: Schedule, network: Network, name: str) -> None:
    """Let a task of the schedule be the worker of a driver."""
    driver.make_lock = functools.partial(ScheduledLock, schedule)
    driver._worker = ScheduledWorker(schedule, network, lambda: driver.drive, name)
    driver.wake = driver._worker.wake


def explore(check: Callable[[random.Random], None], seeds: Iterable[int]) -> None:
    """Check the schedules of these seeds; an error names its seed."""
    for seed in seeds:
        try:
            check(random.Random(seed))
        except Exception as error:
            raise AssertionError(f"schedule of seed {seed}: {error!r}") from error


def first_failure(
    check: Callable[[random.Random], None], error: Any, seeds: Iterable[int] = range(300)
) -> int | None:
    """The first seed whose schedule ends with ``error``."""
    for seed in seeds:
        try:
            check(random.Random(seed))
        except error:
            return seed
    return None


def drop_wake_ups(monkeypatch: Any) -> None:
    """Plant a fault: workers are not woken when the program waits for them."""
    monkeypatch.setattr(
        ScheduledWorker,
        "wait_for",
        lambda self, event, is_late: self._schedule.pause("its worker", event.is_set),
    )
