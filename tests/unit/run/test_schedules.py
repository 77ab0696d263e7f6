"""Whole steps of several ranks, under schedules that chance picks: no rank waits for ever, averages
are the exact ones, and all ranks end with the same error."""

from __future__ import annotations

import os
import random
import re

import torch
from scheduler import (
    DeadlockError,
    Network,
    OrderedWorld,
    Schedule,
    drop_wake_ups,
    explore,
    first_failure,
    work_in_schedule,
)

from hvd_adaptive import ALQ, QSGD, Hierarchical, PayloadError, ScatterReduce, Tuning
from hvd_adaptive.hooks.ddp.bucket_session import BucketSession
from hvd_adaptive.hooks.ddp.buckets import Bucket, BucketFuture
from hvd_adaptive.hooks.ddp.names import Names
from hvd_adaptive.run.agreement import compare_settings
from hvd_adaptive.run.ordered import OrderedStep

# `make soak` runs 100,000.
SCHEDULES = int(os.environ.get("HVD_ADAPTIVE_SCHEDULES", "40"))
BUCKET, SIZES = 16, ((90, 20), (64,), (130,))  # sizes of the parameters in each bucket
STEPS = 2
UNIFORM = torch.linspace(-1, 1, 31)


def gradients_of(ranks: int, step: int) -> list[list[torch.Tensor]]:
    """Each rank's buckets: whole numbers, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(step)
    return [
        [torch.randint(-50, 50, (sum(s),), generator=generator).float() for s in SIZES]
        for _ in range(ranks)
    ]


def assert_average(
    step: int, bucket: int, average: torch.Tensor, rank: int, ranks: int, gap: float
) -> None:
    """Within a gap of the table of each rank's scale, which is at most the largest coordinate; the
    second stage adds another."""
    everyone = gradients_of(ranks, step)
    exact = sum(own[bucket] for own in everyone) / ranks
    largest = max(float(own[bucket].abs().max()) for own in everyone)
    assert float((average - exact).abs().max()) <= 2.1 * largest * gap, (step, bucket, rank)


class Rank:
    """A rank's program: steps of buckets, as DDP brings them.

    outcome: its error, or None.  described: the last step, before the program waits for it.
    """

    def __init__(self, schedule, network, number, make, plan) -> None:
        self.number, self.plan, self.schedule, self.network = number, plan, schedule, network
        self.compressor = make(bucket_size=BUCKET, min_numel=1, fusion_bytes=4 * 128)
        self.compressor._training.instance.number = 0  # as in a process of its own
        self.parameters = [[torch.nn.Parameter(torch.zeros(n)) for n in of] for of in SIZES]
        self.session = BucketSession(self.compressor, Names([]), None)
        # DDP skips no bucket here, so gradients' names are not compared.
        self.session._world = OrderedWorld(schedule, network, number)
        work_in_schedule(self.session._driver, schedule, network, f"worker {number}")
        self.outcome: BaseException | None = None
        self.completed = self.early = 0
        schedule.add(f"rank {number}", self.run)

    def run(self) -> None:
        try:
            compare_settings(self.session._world, self.compressor)
            for step in range(STEPS):
                self.step(step)
                self.completed = step + 1
        except (PayloadError, RuntimeError, KeyError) as error:
            self.outcome = error
            if not isinstance(error, PayloadError):  # the process ends, and with it its connections
                self.network.dead.add(self.number)
                self.network.version += 1

    def step(self, step: int) -> None:
        own = [b.clone() for b in gradients_of(self.network.size, step)[self.number]]
        buckets, gap = [], self.widest_gap()
        for index, (buffer, parameters) in enumerate(zip(own, self.parameters, strict=True)):
            self.schedule.pause()
            if self.plan.get("dies") == (self.number, step, index):
                raise KeyError("this rank dies")
            if self.plan.get("cut off") == (step, index):  # an error in backward on every rank
                self.plan = {}
                return self.step(step)
            buckets.append(bucket_of(buffer, parameters))
            self.session.take(buckets[-1], index)
            self.arrive_early(own, index + 1)
        self.schedule.pause()
        self.described = self.session.describe()
        self.session.finish()
        for index, bucket in enumerate(buckets):
            assert bucket.future.done()
            average, gap = bucket.future.wait(), max(gap, self.widest_gap())  # a fit is in the step
            assert_average(step, index, average, self.number, self.network.size, gap)

    def widest_gap(self) -> float:
        return float(self.compressor.levels.diff().max())

    def arrive_early(self, own: list[torch.Tensor], first: int) -> None:
        """Hand over some gradients of buckets from ``first`` on, as autograd's hooks do, in this
        rank's own order."""
        session, early = self.session, self.session._early
        if session._pending is None or session._pending.collects:
            return
        for bucket in map(bucket_of, own[first:], self.parameters[first:]):
            for slot, view in session._binding.by_slot(bucket).items():
                if slot not in early.sent and self.schedule.choose([False, True]):
                    early._addresses[slot] = view.data_ptr()
                    early.sent.add(slot)
                    session._arrive_early({slot: view})
                    self.early += 1


def bucket_of(buffer: torch.Tensor, parameters: list[torch.nn.Parameter]) -> Bucket:
    views = buffer.split([p.numel() for p in parameters])
    return Bucket(buffer, parameters, views, BucketFuture())


def run(choose, ranks, make, plan):
    schedule = Schedule(choose)
    hit = plan.get("damage")

    def damage(number, sender, receiver, part):
        if part.dtype == torch.uint8 and part.numel() > 96 and hit == (number, sender, receiver):
            part[100] ^= 255
        return part

    network = Network(ranks, damage)
    schedule.events = network.events
    all_ranks = [Rank(schedule, network, number, make, plan) for number in range(ranks)]
    schedule.run()
    return all_ranks


SCHEMES = {
    "allgather": lambda **k: QSGD(bits=8, norm="linf", exchange="allgather", **k),
    "scatter_reduce": lambda **k: QSGD(
        bits=8, norm="linf", exchange=ScatterReduce(second_stage_bits=8), **k
    ),
    "fits": lambda **k: ALQ(
        bits=5, norm="linf", table=UNIFORM, update_steps=[0, 1], exchange="allgather", **k
    ),
    "in the program": lambda **k: QSGD(
        bits=8,
        norm="linf",
        exchange=ScatterReduce(second_stage_bits=8),
        tuning=Tuning(worker=False),
        **k,
    ),
}


def check(rng: random.Random) -> None:
    """One schedule, with at most one accident."""
    ranks, make = rng.choice([2, 3]), SCHEMES[rng.choice(sorted(SCHEMES))]
    accident, plan = rng.choice(["", "", "dies", "damage", "cut off"]), {}
    if accident == "dies":
        plan["dies"] = rng.randrange(ranks), rng.randrange(STEPS), rng.randrange(len(SIZES))
    elif accident == "damage":
        plan["damage"] = rng.randrange(4, 20), *rng.sample(range(ranks), 2)
    elif accident == "cut off":
        plan["cut off"] = rng.randrange(STEPS), rng.randrange(len(SIZES))
    all_ranks = run(rng.choice, ranks, make, plan)
    outcomes = [rank.outcome for rank in all_ranks]
    if accident == "dies":
        for rank, outcome in enumerate(outcomes):
            kind = KeyError if rank == plan["dies"][0] else RuntimeError
            assert type(outcome) is kind, outcomes
    elif any(outcomes):
        assert accident == "damage", outcomes
        assert {type(outcome) for outcome in outcomes} == {PayloadError}
        assert len(set(map(str, outcomes))) == len({rank.completed for rank in all_ranks}) == 1
    else:
        assert all(rank.completed == STEPS for rank in all_ranks)


def test_any_schedule():
    """`make soak` explores 100,000."""
    explore(check, range(48, 48 + SCHEDULES))  # the first ones give no step up


def test_averages_tables_are_fitted_in_the_step_that_sets_the_exchange_up(monkeypatch):
    """Nodes are known only then, and no fit of gradients is due: the second stage's must not wait
    for the next one."""
    monkeypatch.setitem(
        globals(), "assert_average", lambda *_: None
    )  # gradients' table is unfitted

    def make(**keywords):
        nodes = Hierarchical(second_stage_bits=8)
        return ALQ(bits=8, update_steps=[50], exchange=nodes, **keywords)

    ranks = run(random.Random(0).choice, 3, make, {})
    assert [rank.outcome for rank in ranks] == [None] * 3
    seconds = [rank.compressor.parts.default.fitted_second for rank in ranks]
    assert [second.table_version for second in seconds] == [1] * 3


def test_early_gradients_arrive():
    """The schedules hand over gradients before their buckets."""
    ranks = [run(random.Random(s).choice, 2, SCHEMES["allgather"], {}) for s in range(12)]
    assert sum(rank.early for of in ranks for rank in of) > 12


def test_a_dropped_wake_up_is_found(monkeypatch):
    """A worker that is not woken when the last gradient has arrived."""
    drop_wake_ups(monkeypatch)
    assert first_failure(check, DeadlockError) is not None


def test_a_future_that_is_set_early_is_found(monkeypatch):
    """A future that is set when the groups of its bucket have been sent, not received."""
    monkeypatch.setattr(OrderedStep, "is_back", lambda self, slots: True)
    assert first_failure(check, (AssertionError, RuntimeError, DeadlockError)) is not None


def test_collectives_follow_the_layout_whatever_arrives_first():
    """A1, A2, B1, A3, B2, ...: as the module says."""
    orders = set()
    for seed in range(6):
        one, _ = run(random.Random(seed).choice, 2, SCHEMES["scatter_reduce"], {})
        names = [sent[0][0] for sent in one.network.sent]
        orders.add(tuple(re.sub(r"(.).*group(\d).*", r"\1\2", name) for name in names))
    (order,) = orders
    groups = ("a5", "a4", "g5", "a3", "g4", "a2", "g3", "a1", "g2", "a0", "g1", "g0")
    first, later = ("equal ddp.replicas", "equal ddp.corrupt"), ("equal ddp.corrupt",)
    assert order == ("equal objects", "position", *groups, *first, "position", *groups, *later)


def test_a_stall_is_described():
    """A step that waits says which gradients have arrived, and what each of its groups waits
    for."""
    runs = [run(random.Random(seed).choice, 2, SCHEMES["scatter_reduce"], {}) for seed in range(6)]
    told = [rank.described for ranks in runs for rank in ranks]
    late = [text for text in told if "collective 1" in text or "collective 2" in text]
    assert late and all(text.startswith("step 1, attempt 0: 4 of 4 gradients") for text in late)
    assert any("group" in line and line.endswith(" s") for line in late[0].splitlines())
