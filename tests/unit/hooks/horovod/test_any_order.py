"""Steps of Horovod's optimizers on several ranks, under schedules that chance picks: no rank waits
for ever, averages are right, and the same bits whatever the order; all ranks end with one error."""

from __future__ import annotations

import functools
import os
import random

import pytest
import torch
from damage import flipped, gone, truncated
from named_ranks import NamedNetwork, Optimizer
from scheduler import DeadlockError, Schedule, ScheduledLock, drop_wake_ups, explore, first_failure
from states import plain

from hvd_adaptive import (
    ALQ,
    ECDQ,
    QSGD,
    Hierarchical,
    PayloadError,
    RankMismatchError,
    ScatterReduce,
    Tuning,
)
from hvd_adaptive.hooks.horovod import drive as drive_module
from hvd_adaptive.run.step import Step

SCHEDULES = int(os.environ.get("HVD_ADAPTIVE_SCHEDULES", "40"))
SIZES, STEPS, NETS = (90, 20, 64, 130), 2, ("a", "b")


def gradients_of(ranks: int, step: int, net: int, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    draw = torch.Generator().manual_seed(10 * step + net)
    return [[torch.randn(n, generator=draw).to(dtype) for n in SIZES] for _ in range(ranks)]


class Rank:
    """A rank's program: two backward passes, then two optimizers' steps in an order of its own.

    averages: by step and optimizer.  outcome: the error that ended it, or None.  cuts: how often it
    has given a step up.
    """

    def __init__(self, schedule, network, number, make, plan, orders) -> None:
        self.schedule, self.number, self.plan, self.orders = schedule, number, plan, orders
        self.ranks, self.dtype = network.size, plan.get("dtype", torch.float32)
        op = plan.get("op", "Average")
        self.optimizers = [
            Optimizer(schedule, network, number, net, SIZES, make(number), op, self.dtype)
            for net in NETS
        ]
        self.own: dict[int, list[torch.Tensor]] = {}
        self.averages: dict[tuple[int, int], list[torch.Tensor]] = {}
        self.outcome: Exception | None = None
        self.network, self.cuts = network, 0
        schedule.add(f"rank {number}", self.run)

    def run(self) -> None:
        try:
            for step in range(STEPS):
                while self.is_cut_off(step):
                    for optimizer in self.optimizers:
                        optimizer.forget_handles()
                    self.schedule.pause()
                    for net in self.orders(self.number):
                        self.optimizers[net].driver.give_up()
                for net in self.orders(self.number):
                    self.stepping = net
                    averages = self.optimizers[net].step()
                    self.averages[step, net] = [average.clone() for average in averages]
        except (PayloadError, RankMismatchError, RuntimeError, KeyError) as error:
            self.outcome = error
            if not isinstance(error, PayloadError | RankMismatchError):
                self.network.dead.add(self.number)
                self.network.version += 1

    def is_cut_off(self, step: int) -> bool:
        """Run the backward passes; return whether the program gives the step up after them."""
        for net in self.orders(self.number):
            optimizer = self.optimizers[net]
            optimizer.begin()
            own = gradients_of(self.ranks, step, net, self.dtype)[self.number]
            self.own[net] = own
            for slot in reversed(range(len(own))):
                self.schedule.pause()
                if self.plan.get("dies") == (self.number, step, net, slot):
                    raise KeyError("this rank dies")
                optimizer.arrive(slot, own[slot])
        self.schedule.pause()
        if self.plan.get("cut off") != step or self.cuts == self.plan["times"]:
            return False
        self.cuts += 1
        return True


def run(choose, ranks, make, plan, orders):
    schedule, hit = Schedule(choose), plan.get("damage")

    def damage(number, sender, receiver, part):
        if hit != (number, sender, receiver) or ".group" not in network.names[number]:
            return part
        # Plain floats inside a node have no checksum: only their length tells.
        has_checksum = part.dtype == torch.uint8 and bytes(part[:4].tolist()) == b"HVDA"
        of_any = plan["kind"] is not flipped and part.numel()
        return plan["kind"](part) if has_checksum or of_any else part

    network = NamedNetwork(ranks, damage, plan.get("direct", False))
    schedule.events = network.events
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Step, "make_lock", staticmethod(lambda: ScheduledLock(schedule)))
        patch.setattr(drive_module, "SESSIONS", NETS)
        patch.setattr(drive_module, "PATIENCE", 0.0)
        every = [Rank(schedule, network, n, make, plan, orders) for n in range(ranks)]
        schedule.run()
    return every


OF_ALL = {"bucket_size": 16, "min_numel": 1, "fusion_bytes": 4 * 128}
SECOND = {"exchange": ScatterReduce(second_stage_bits=8)}
SCHEMES = {
    "allgather": lambda **k: QSGD(bits=8, norm="linf", exchange="allgather", **k),
    "scatter_reduce": lambda **k: QSGD(bits=8, norm="linf", **SECOND, **k),
    "fits": lambda **k: ALQ(bits=8, norm="linf", update_steps=[0, 1], **SECOND, **k),
    "hierarchical": lambda **k: QSGD(
        bits=8, norm="linf", exchange=Hierarchical(ranks_per_node=1, second_stage_bits=8), **k
    ),
    "pairs": lambda **k: QSGD(
        bits=8, norm="linf", exchange=Hierarchical(ranks_per_node=2, second_stage_bits=8), **k
    ),
    "feedback": lambda **k: QSGD(bits=6, error_feedback=0.5, exchange="allgather", **k),
    "ecdq": lambda **k: ECDQ(bits=4.0, exchange="allgather", **k),
}
EXACT = ("allgather", "scatter_reduce", "fits", "hierarchical", "pairs")
SETTINGS = [
    *[{}] * 3,
    {"warmup_steps": 1},
    {"min_numel": 80},
    {"tail": "full"},
    {"parameter_bits": {"a.1": 8, "*.2": None}},
]
DTYPES = [*[torch.float32] * 3, torch.float16, torch.bfloat16, torch.float64]
ACCIDENTS = ("", "dies", "damage", "cut off")


def any_order(rng: random.Random):
    """Orders of the optimizers, another one at each call and rank."""
    return lambda number: rng.sample(range(len(NETS)), len(NETS))


def check(rng: random.Random, accident: str) -> bool:
    """One schedule; whether it came to its end. What is sent is read as late as the schedule says:
    memory that is used again meanwhile gives wrong averages."""
    name = rng.choice(sorted(SCHEMES))
    ranks = rng.choice([2, 4] if name == "pairs" else [2, 3])
    plan = {"direct": rng.random() < 0.5, "dtype": rng.choice(DTYPES)}
    if rng.random() < 0.3:
        plan["op"] = "Sum"
    if accident == "dies":
        places = (ranks, STEPS, len(NETS), len(SIZES))
        plan["dies"] = tuple(rng.randrange(count) for count in places)
    elif accident == "damage":
        plan["damage"] = rng.randrange(20, 60), *rng.sample(range(ranks), 2)
        plan["kind"] = rng.choice([flipped, truncated, gone])
    elif accident == "cut off":
        plan |= {"cut off": rng.randrange(STEPS), "times": rng.randint(1, 3)}
    workers = [rng.random() < 0.7 for _ in range(ranks)]
    own = OF_ALL | rng.choice(SETTINGS)
    make = lambda number: SCHEMES[name](tuning=Tuning(worker=workers[number]), **own)  # noqa: E731
    every = run(rng.choice, ranks, make, plan, any_order(rng))
    outcomes = [rank.outcome for rank in every]
    if accident == "dies":
        for rank, outcome in enumerate(outcomes):
            assert type(outcome) is (KeyError if rank == plan["dies"][0] else RuntimeError)
        return False
    if any(outcomes):
        assert accident == "damage", outcomes
        assert {type(outcome) for outcome in outcomes} == {PayloadError}
        (told,) = set(map(str, outcomes))
        assert f"corrupt at rank {plan['damage'][2]} (group" in told
        for rank in every:
            assert all(bool(own.isnan().all()) for own in rank.own[rank.stepping])
        return False
    for (step, net), averages in every[0].averages.items():
        for rank in every[1:]:
            for own, theirs in zip(averages, rank.averages[step, net], strict=True):
                assert torch.equal(own, theirs)
        if name in EXACT:
            scale = ranks if plan.get("op") == "Sum" else 1
            check_averages(averages, gradients_of(ranks, step, net, plan["dtype"]), scale)
    assert len(every[0].averages) == STEPS * len(NETS)
    return True


def check_averages(averages, everyone, scale) -> None:
    """Within a step of 8 bits of the largest coordinate, for each of two stages, and the dtype's
    rounding."""
    largest = max(float(own.abs().max()) for of_rank in everyone for own in of_rank)
    rounding = 4 * torch.finfo(averages[0].dtype).eps
    for average, *own in zip(averages, *everyone, strict=True):
        exact = torch.stack(own).double().mean(0) * scale
        error = float((average.double() - exact).abs().max())
        assert error <= scale * largest * (2.1 / 100 + rounding)


@pytest.mark.parametrize("accident", ACCIDENTS)
def test_any_schedule(accident):
    ended = []
    explore(lambda rng: ended.append(check(rng, accident)), range(SCHEDULES // len(ACCIDENTS)))
    if accident in ("", "cut off"):
        assert all(ended)
    else:
        assert not all(ended)


def test_a_first_state_that_was_given_up_is_shared_again():
    """This schedule gives a step up while ranks share the first one's state."""
    assert check(random.Random(298), "cut off")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_same_bits_with_and_without_a_worker(scheme):
    found = []
    for works in (False, True):
        make = lambda number, w=works: SCHEMES[scheme](tuning=Tuning(worker=w), **OF_ALL)  # noqa: E731
        rng = random.Random(int(works))
        found.append([rank.averages for rank in run(rng.choice, 2, make, {}, any_order(rng))])
    assert len(found[0][0]) == STEPS * len(NETS) and plain(found[0]) == plain(found[1])


@pytest.mark.parametrize("works", [True, False])
def test_settings_that_differ_are_told_by_all(works):
    def make(number):
        return QSGD(bits=8 - (number == 1), tuning=Tuning(worker=works), **OF_ALL)

    rng = random.Random(3)
    every = run(rng.choice, 3, make, {}, lambda number: [0, 1])
    assert {str(rank.outcome) for rank in every} == {str(every[0].outcome)}
    assert "bits is 8 on ranks 0, 2, 7 on rank 1" in str(every[0].outcome)
    assert isinstance(every[0].outcome, RankMismatchError)


def test_a_dropped_wake_up_is_found(monkeypatch):
    """A worker that is not woken when the program waits for it."""
    drop_wake_ups(monkeypatch)
    assert first_failure(functools.partial(check, accident=""), DeadlockError) is not None
