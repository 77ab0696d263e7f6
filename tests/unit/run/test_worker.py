"""A worker exchanges groups while gradients arrive, and computes the same bits as without it."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

from hvd_adaptive import ALQ, ECDQ, ORQ, QSGD, PayloadError
from hvd_adaptive.run.step import Step
from hvd_adaptive.run.worker import Worker

sys.path.append(str(Path(__file__).parents[1] / "exchange"))
from late_ranks import SECONDS, LateRank, LateWorld, Wire, intact

SHAPES = [(40, 50), (300,), (7,), (64, 64), (1000,), (3,)]
SCHEMES = {
    "alq": lambda **k: ALQ(bits=3, bucket_size=256, min_numel=20, **k),
    "ecdq": lambda **k: ECDQ(bits=2.0, bucket_size=256, min_numel=20, **k),
    "orq": lambda **k: ORQ(bucket_size=256, min_numel=20, **k),
    "feedback": lambda **k: QSGD(bits=4, bucket_size=256, min_numel=20, error_feedback=0.5, **k),
}
EXCHANGES = {
    "allgather": {},
    "scatter_reduce": {"exchange": "scatter_reduce", "second_stage_bits": 5},
    "hierarchical": {"exchange": "hierarchical", "ranks_per_node": 2, "second_stage_bits": 5},
}


class PolledWorld(LateWorld):
    """Messages are sent at once, and ``poll`` says whether all of them are there."""

    orders_collectives = True

    def _submit(self, name, parts, gathers):
        self.wire.put(name, self.rank, list(parts))
        self._pending[name] = [], gathers
        return name

    def poll(self, name):
        pause()
        return name not in self._pending or self.wire.is_complete(name)

    def synchronize(self, name):
        _, gathers = self._pending.pop(name)
        received = [
            part if sender == self.rank else self.damage(name, sender, self.rank, part)
            for sender, part in enumerate(self.wire.take(name, self.rank))
        ]
        splits = torch.tensor([part.numel() for part in received], dtype=torch.int32)
        return torch.cat(received) if gathers else (torch.cat(received), splits)

    def flush(self):
        """Everything has been sent."""


class PolledWire(Wire):
    def is_complete(self, name):
        with self._there:
            return len(self._sent[name]) == self.size


def pause() -> None:
    """Let other threads run for a random time."""
    if random.random() < 0.3:
        time.sleep(random.random() * 0.002)


class Rank(LateRank):
    """One rank, whose steps have a worker if ``works``."""

    def __init__(self, wire, rank, compressor, works, damage):
        super().__init__(wire, rank, compressor, SHAPES, torch.float32, False, damage)
        self.world = self.binding.world = PolledWorld(wire, rank, False, damage)
        compressor.instance.training = 0  # as in a process of its own
        self.current: Step | None = None
        self.worker = Worker(lambda: self.current) if works else None

    def step(self, gradients, number):
        self.compressor.step = number
        self.binding.name = f"polled{number}"
        self.binding.prepare(number)
        residuals = self.compressor.residuals
        if residuals is not None:
            residuals.lay_out(self.binding.layout, self.world.rank, self.world.size)
        step = Step(self.binding, self.binding.layout, number, 0, residuals, self.worker)
        self.current = step
        slots = [int(member.name[1:]) for member in self.binding.layout.members]
        released = random.randrange(len(slots))
        for count, slot in enumerate(reversed(range(len(slots)))):
            if count == released:
                step.release(1.0 / self.world.size)
            pause()
            step.arrive(slot, gradients[slots[slot]])
        pause()
        step.launch_all(1.0 / self.world.size)
        results = {slots[slot]: step.result(slot) for slot in range(len(slots))}
        assert step.finished
        step.commit()
        return [results[slot] for slot in range(len(slots))]


def run(make, gradients, works, damage=intact):
    """The results of each step, or the error that ended it, by rank."""
    size = len(gradients[0])
    wire, outcomes = PolledWire(size), [[] for _ in range(size)]

    def work(rank):
        one = Rank(wire, rank, make(fusion_bytes=8192), works, damage)
        for number, of_step in enumerate(gradients):
            own = [gradient.clone() for gradient in of_step[rank]]
            try:
                outcomes[rank].append([result.clone() for result in one.step(own, number)])
            except Exception as error:
                outcomes[rank].append(error)
                break

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    return outcomes


def gradients_of(ranks: int, steps: int = 3) -> list:
    generator = torch.Generator().manual_seed(5)
    return [
        [[torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(ranks)]
        for _ in range(steps)
    ]


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_same_bits_with_and_without_a_worker(scheme, exchange):
    """Delays at each hand-over are random; averages do not depend on them."""
    if scheme == "feedback" and exchange == "hierarchical":
        pytest.skip("not allowed")
    gradients = gradients_of(4)

    def make(**more):
        return SCHEMES[scheme](**EXCHANGES[exchange], **more)

    without = run(make, gradients, works=False)
    for _ in range(2):
        found = run(make, gradients, works=True)
        for rank, (own, wanted) in enumerate(zip(found, without, strict=True)):
            for number, (results, others) in enumerate(zip(own, wanted, strict=True)):
                assert not isinstance(results, Exception), (rank, number, results)
                for result, other in zip(results, others, strict=True):
                    assert torch.equal(result, other), (rank, number)


def test_a_payload_that_arrives_corrupt_fails_on_every_rank():
    def damage(name, sender, receiver, part):
        if (sender, receiver) == (0, 1) and ".group1" in name and part.numel() > 100:
            part = part.clone()
            part[-1] ^= 1
        return part

    outcomes = run(SCHEMES["alq"], gradients_of(3, 1), works=True, damage=damage)
    for of_rank in outcomes:
        assert isinstance(of_rank[0], PayloadError) and "rank 1" in str(of_rank[0])


class Counting:
    """Work of so many turns."""

    def __init__(self, turns: int) -> None:
        self.left, self.done = turns, threading.Event()

    def advance(self):
        if not self.left:
            self.done.set()
            return None
        self.left -= 1
        return self.left % 2 == 0


def test_a_worker_sleeps_when_there_is_nothing_to_do_and_ends_with_its_owner():
    work = Counting(20)
    worker = Worker(lambda: work)
    worker.wake()
    assert work.done.wait(SECONDS)
    thread = worker._thread
    time.sleep(0.05)
    work.left = 5
    time.sleep(0.05)
    assert work.left == 5, "nobody has woken it"
    found = weakref.ref(worker)
    del worker
    gc.collect()
    thread.join(SECONDS)
    assert found() is None and not thread.is_alive()


def test_an_error_of_the_worker_is_raised_in_the_programs_thread():
    class Broken(PolledWorld):
        def poll(self, name):
            raise ConnectionError("gone")

    wire = PolledWire(1)
    rank = Rank(wire, 0, SCHEMES["alq"](), True, intact)
    rank.world = rank.binding.world = Broken(wire, 0, False, intact)
    step = Step(rank.binding, rank.binding.layout, 0, worker=rank.worker)
    rank.current = step
    step.release(1.0)
    for slot, member in enumerate(rank.binding.layout.members):
        step.arrive(slot, torch.randn(member.shape))
    end = time.monotonic() + SECONDS
    while step._error is None and time.monotonic() < end:
        time.sleep(0.001)
    with pytest.raises(ConnectionError, match="gone"):
        step.launch_all(1.0)


def test_a_worker_starts_again_after_a_fork():
    work = Counting(1)
    worker = Worker(lambda: work)
    worker.wake()
    assert work.done.wait(SECONDS)
    child = os.fork()
    if child == 0:
        work.done.clear()
        work.left = 1
        worker.wake()
        os._exit(0 if work.done.wait(SECONDS) else 1)
    assert os.waitpid(child, 0)[1] == 0
