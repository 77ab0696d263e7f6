"""LocalSGD in fragments, beside a plain simulation of all ranks: in float64, or compressed by
``simulate.Ranks``, bit for bit."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from local_rounds import make_net, make_optimizer
from torch import nn

from hvd_adaptive import ALQ, QSGD, LocalSGD, RankMismatchError, instances
from hvd_adaptive.hooks.ddp.buckets import _by_bucket
from hvd_adaptive.simulate import Ranks
from hvd_adaptive.simulate import ranks as simulated_ranks

# Of the net's parameters, of 3200, 80, 6400, 80, 1600 and 20 coordinates.
PARTS = {1: [[0, 1, 2, 3, 4, 5]], 2: [[0, 1], [2, 3, 4, 5]], 3: [[0, 1], [2], [3, 4, 5]]}
# every, fragments, delay, mixing: and the steps of a period after which rounds begin.
CASES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "whole": ({"every": 3, "fragments": 1}, (3,)),
    "in turn": ({"every": 5, "fragments": 2}, (3, 5)),
    "delayed": ({"every": 6, "fragments": 3, "delay": 1}, (2, 4, 6)),
    "until the next": ({"every": 6, "fragments": 2, "delay": 3, "mixing": 0.25}, (3, 6)),
    "discarded": ({"every": 4, "fragments": 2, "delay": 2, "mixing": 0.0}, (2, 4)),
    "whole and delayed": ({"every": 3, "fragments": 1, "delay": 3}, (3,)),
}
OUTER = {"momentum": 0.9, "lr": 0.7}


def backward(net: nn.Module, rank: int, step: int, scaler: Any = None) -> None:
    """A rank's gradients of its own data, scaled by a GradScaler if there is one."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(16, 40, generator=generator).to(next(net.parameters()).dtype)
    net.zero_grad()
    loss = F.cross_entropy(net(x), x[:, :20].argmax(1))
    (loss if scaler is None else scaler.scale(loss)).backward()


@dataclass
class Simulated:
    """One rank: its net, the shared parameters and their momentum, as Algorithm 2 has them."""

    net: nn.Module
    inner: torch.optim.Optimizer
    shared: list[torch.Tensor]
    buffers: list[torch.Tensor | None]
    has_moved: list[bool]
    is_finished: bool = False
    # (step, fragment, averages) of a round that is applied later.
    later: tuple[int, int, list[torch.Tensor]] | None = None


class FragmentRanks(Ranks):
    """Groups of which no rank has a gradient are not sent, and tables are not fitted to them."""

    def _is_sent(self, group: Any) -> bool:
        return not set.intersection(*self._missing).issuperset(group.slots)

    def _exchanged(self, index: int, everyone: Any) -> torch.Tensor:
        if self._is_sent(self.layout.groups[index]):
            return super()._exchanged(index, everyone)
        return torch.zeros_like(self.flats[index][0])

    def _samples(self, rank: int, step: int) -> Callable[[int, str], Any]:
        trips = self._trips(rank, step)
        sent = [group for group in self.layout.groups if self._is_sent(group)]
        return lambda count, part: trips.shares(sent, count, part).draw(rank, trips.values)


@dataclass
class Streaming:
    """All ranks of a training in fragments.

    counts: Each rank's steps.  skipped: (rank, step) pairs that are no steps.
    compressor: None averages exactly, in float64.
    """

    counts: Sequence[int]
    starts: Sequence[int]
    every: int
    fragments: int
    delay: int = 0
    mixing: float = 0.5
    momentum: float = 0.0
    lr: float = 1.0
    skipped: frozenset[tuple[int, int]] = frozenset()
    compressor: Any = None
    rounds: int = 0
    turn: int = 0
    ranks: list[Simulated] = field(default_factory=list)
    # By step and rank: the parameters after it.
    history: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)

    def run(self) -> None:
        """Until all ranks have finished."""
        self.carrier = make_net()
        if self.compressor is not None:
            self.exchange = self._exchange()
        for _ in self.counts:
            net = make_net().double() if self.compressor is None else make_net()
            shared = [p.detach().clone() for p in net.parameters()]
            buffers, moved = [None] * len(shared), [False] * self.fragments
            self.ranks.append(Simulated(net, make_optimizer(net), shared, buffers, moved))
        for step in range(1, max(self.counts) + 1):
            for number, rank in enumerate(self.ranks):
                if step <= self.counts[number] and (number, step) not in self.skipped:
                    backward(rank.net, number, step)
                    rank.inner.step()
                    rank.has_moved = [True] * self.fragments
                if rank.later is not None and rank.later[0] == step:
                    self._apply_later(rank)
            if (step - 1) % self.every + 1 in self.starts:
                self._average(step)
            for number, rank in enumerate(self.ranks):
                self.history[step, number] = [p.detach().clone() for p in rank.net.parameters()]
                if step == self.counts[number]:
                    rank.is_finished = True
                    self._apply_later(rank)
        for _ in range(self.fragments):
            self._average(0)

    def _exchange(self) -> Ranks:
        """Return simulated ranks whose groups hold the parameters of one fragment each."""

        def by_fragment(members: list[Any], **bounds: Any) -> Any:
            return _by_bucket([[members[i] for i in of] for of in PARTS[self.fragments]], **bounds)

        named = [(str(i), p) for i, p in enumerate(self.carrier.parameters())]
        with mock.patch.object(simulated_ranks, "build_layout", by_fragment):
            return FragmentRanks(named, self.compressor, len(self.counts))

    def _averages(self, part: Sequence[int], ways: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        """Return the averages of all ranks' ways."""
        if self.compressor is None:
            return [torch.stack(of).mean(0) for of in zip(*ways, strict=True)]
        own = list(self.carrier.parameters())
        for rank, of_rank in enumerate(ways):
            for i, way in zip(part, of_rank, strict=True):
                own[i].grad = way.clone()
            self.exchange.take(rank)
        if self.exchange.due(self.rounds):
            self.exchange.refit(self.rounds)
        self.exchange.average(self.rounds)
        averages = [own[i].grad.clone() for i in part]
        self.carrier.zero_grad()
        return averages

    @torch.no_grad()
    def _average(self, step: int) -> None:
        fragment, self.turn = self.turn % self.fragments, self.turn + 1
        active = [rank for rank in self.ranks if rank.has_moved[fragment]]
        if not active:
            return
        part = PARTS[self.fragments][fragment]
        ways = [[rank.shared[i] - list(rank.net.parameters())[i] for i in part] for rank in active]
        averages = self._averages(part, ways)
        self.rounds += 1
        for rank in self.ranks:
            rank.has_moved[fragment] = False
            if self.delay and not rank.is_finished:
                rank.later = step + self.delay, fragment, averages
            else:
                self._apply(rank, fragment, averages, 0.0)

    def _apply_later(self, rank: Simulated) -> None:
        if rank.later is not None:
            _, fragment, averages = rank.later
            rank.later = None
            self._apply(rank, fragment, averages, self.mixing)
            rank.has_moved[fragment] = self.mixing > 0

    @torch.no_grad()
    def _apply(self, rank: Simulated, fragment: int, averages: Any, mixing: float) -> None:
        own = list(rank.net.parameters())
        for i, average in zip(PARTS[self.fragments][fragment], averages, strict=True):
            way, last = average, rank.buffers[i]
            if self.momentum:
                # Rounded as torch's SGD rounds.
                now = average.clone() if last is None else last.mul_(self.momentum).add_(average)
                rank.buffers[i], way = now, average.add(now, alpha=self.momentum)
            rank.shared[i] = rank.shared[i].add(way, alpha=-self.lr)
            mixed = own[i].mul(mixing).add(rank.shared[i], alpha=1.0 - mixing)
            own[i].copy_(mixed if mixing else rank.shared[i])


def assert_close(net: nn.Module, others: Sequence[torch.Tensor]) -> None:
    """Up to the rounding of float64."""
    for own, other in zip(net.parameters(), others, strict=True):
        torch.testing.assert_close(own.detach(), other, rtol=1e-11, atol=1e-13)


def check_simulation(
    rank: int,
    counts: Sequence[int],
    case: str,
    skipped: frozenset[tuple[int, int]] = frozenset(),
) -> None:
    """The parameters after every step, and after the last round."""
    keywords, starts = CASES[case]
    sim = Streaming(counts, starts, **keywords, **OUTER, skipped=skipped)
    sim.run()
    net = make_net().double()
    optimizer = LocalSGD(make_optimizer(net), **keywords, **OUTER)
    for step in range(1, counts[rank] + 1):
        if (rank, step) in skipped:
            optimizer.skip()
        else:
            backward(net, rank, step)
            optimizer.step()
        assert_close(net, sim.history[step, rank])
    optimizer.finish()
    for other in sim.ranks:
        assert_close(net, list(other.net.parameters()))
    assert optimizer.rounds == sim.rounds


COMPRESSED = {
    "feedback": lambda: QSGD(
        bits=4, bucket_size=512, min_numel=1, error_feedback=1.0, exchange="allgather"
    ),
    "tables": lambda: ALQ(
        bits=3, bucket_size=512, min_numel=1, update_steps=[0, 3], exchange="scatter_reduce"
    ),
    "auto": lambda: QSGD(bits=3, bucket_size=512, error_feedback="auto", exchange="allgather"),
}


def check_compressed_simulation(rank: int, ranks: int, scheme: str) -> None:
    """The parameters after every step, and after the last round, bit for bit."""
    keywords, starts = CASES["delayed"]
    sim = Streaming([14] * ranks, starts, **keywords, **OUTER, compressor=COMPRESSED[scheme]())
    sim.run()
    net = make_net()
    compressor = COMPRESSED[scheme]()
    optimizer = LocalSGD(make_optimizer(net), compression=compressor, **keywords, **OUTER)
    for step in range(1, 15):
        backward(net, rank, step)
        optimizer.step()
        for p, other in zip(net.parameters(), sim.history[step, rank], strict=True):
            assert torch.equal(p, other), step
    optimizer.finish()
    for p, other in zip(net.parameters(), sim.ranks[rank].net.parameters(), strict=True):
        assert torch.equal(p, other)
    assert optimizer.rounds == compressor.step == sim.rounds


def check_compressed(
    rank: int, gather: Callable[[torch.Tensor], torch.Tensor], caplog: Any
) -> None:
    """Each fragment's mean is as exact as 8 bits; residuals of all fragments are kept."""
    net = make_net()
    compressor = QSGD(bits=8, norm="linf", min_numel=1, error_feedback=1.0, exchange="allgather")
    named = list(net.named_parameters())
    optimizer = LocalSGD(
        make_optimizer(net), every=6, fragments=3, compression=compressor, named_parameters=named
    )
    before = [p.detach().clone() for p in net.parameters()]
    with caplog.at_level(logging.WARNING, logger="hvd_adaptive"):
        for step in range(1, 19):
            due = PARTS[3][(step // 2 - 1) % 3] if step % 2 == 0 else []
            backward(net, rank, step)
            optimizer.optimizer.step()
            everyone = [gather(p.detach()) for p in net.parameters()]
            for p in net.parameters():  # the step was taken
                p.grad = None
            optimizer.step()
            moved = [(everyone[i] - before[i]).abs().max() for i in due]
            for i, p in enumerate(p.detach() for p in net.parameters()):
                if i in due:  # rounded in one bucket, with what was lost in the round before
                    error = float((p - everyone[i].mean(0)).abs().max())
                    assert 0 < error <= 3 * float(max(moved)) / 127, (step, i)
                    assert bool((gather(p) == p).all())
                    before[i] = p.clone()
                else:
                    assert torch.equal(p, everyone[i][rank])
    assert not [r for r in caplog.records if r.name == "hvd_adaptive"]
    assert compressor.step == optimizer.rounds == 9
    kept = compressor.state_dict()["residuals"]["parameters"]
    assert set(kept) == {name for name, _ in named}
    assert all(bool(residual.any()) for residual in kept.values())
    optimizer.finish()
    assert optimizer.report()["wire_bytes_per_step"] == optimizer.report()["wire_bytes"] / 2


def check_resumed_runs(rank: int, saved_at: int) -> None:
    """Saved with a round in flight, or not; loaded by new objects: the same bits."""

    def made() -> tuple[nn.Module, LocalSGD]:
        net = make_net()
        instances.start_over()
        compressor = ALQ(bits=3, bucket_size=512, error_feedback="auto", update_steps=[0, 3])
        streams = {"every": 6, "fragments": 2, "delay": 2, "mixing": 0.25}
        return net, LocalSGD(make_optimizer(net), compression=compressor, **streams, **OUTER)

    def train(steps: Sequence[int], net: nn.Module, optimizer: LocalSGD) -> None:
        for step in steps:
            backward(net, rank, step)
            optimizer.step()

    whole, optimizer = made()
    train(range(15), whole, optimizer)
    optimizer.finish()
    net, optimizer = made()
    train(range(saved_at), net, optimizer)
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    assert (saved[1]["pending"] is not None) == (saved_at in (4, 7, 10))
    net, optimizer = made()
    net.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(range(saved_at, 15), net, optimizer)
    optimizer.finish()
    for a, b in zip(net.parameters(), whole.parameters(), strict=True):
        assert torch.equal(a, b)


def check_overflow(rank: int, ranks: int, collective: Callable[[], int]) -> None:
    """Rank 0 overflows in its second step of eight, after which a round begins: rounds and the
    program's own collectives stay together, and that step changes nothing.

    collective: One of the program's own, which returns the number of ranks.
    """
    keywords = {"every": 4, "fragments": 2, "delay": 1, "mixing": 0.5}
    sim = Streaming([8] * ranks, (2, 4), **keywords, skipped=frozenset({(0, 2)}))
    sim.run()
    net = make_net().double()
    optimizer = LocalSGD(make_optimizer(net), **keywords)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    for step in range(1, 9):
        backward(net, rank, step, scaler)
        if rank == 0 and step == 2:
            net[0].weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        assert collective() == ranks
        assert_close(net, sim.history[step, rank])
    assert scaler.get_scale() == (4.0 if rank == 0 else 8.0)
    optimizer.finish()
    for other in sim.ranks:
        assert_close(net, list(other.net.parameters()))
    assert optimizer.rounds == sim.rounds


def check_not_finite(rank: int, ranks: int, act: str) -> None:
    """The last rank has NaN in the second fragment when its delayed round begins."""
    broken, net = ranks - 1, make_net().double()
    optimizer = LocalSGD(
        make_optimizer(net),
        every=4,
        fragments=2,
        delay=1,
        on_nonfinite=act,
        named_parameters=net.named_parameters(),
    )
    for step in range(1, 5):
        backward(net, rank, step)
        if rank == broken and step == 4:
            net[4].bias.grad[0] = float("nan")
        optimizer.step()  # returns: the error, if there is one, is raised when the round is applied
    assert optimizer.rounds == 1
    backward(net, rank, 5)
    if act == "raise":
        good = [p.detach().clone() for p in net.parameters()]
        net[4].bias.grad[0] = 0.0
        with pytest.raises(FloatingPointError, match=f"4.bias of rank {broken}"):
            optimizer.step()
        assert optimizer.rounds == 1
        with torch.no_grad():  # good weights are loaded
            for p, value in zip(net.parameters(), good, strict=True):
                p.copy_(value.nan_to_num())
        optimizer.optimizer.state.clear()
    else:
        optimizer.step()
        assert optimizer.rounds == 2
    for step in range(6, 9):
        backward(net, rank, step)
        optimizer.step()
    optimizer.finish()
    assert all(bool(p.isfinite().all()) for p in net.parameters())


def check_frozen_fragments(rank: int, gather: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A fragment that is frozen keeps its bits, and goes on when it is unfrozen; a new layer joins
    the smallest fragment."""
    net = make_net()
    optimizer = LocalSGD(
        make_optimizer(net),
        every=4,
        fragments=2,
        delay=1,
        compression=ALQ(bits=4, bucket_size=512, min_numel=1, error_feedback=1.0),
        **OUTER,
    )

    def train(steps: Sequence[int]) -> None:
        for step in steps:
            backward(net, rank, step)
            for p in added.parameters():
                p.grad = torch.full_like(p, 0.1 * (rank + 1))
            optimizer.step()

    added = nn.ParameterList()
    train(range(4))
    optimizer.average()
    net[0].requires_grad_(False)
    frozen = copy.deepcopy(net[0].state_dict())
    train(range(4, 12))
    optimizer.average()
    assert all(torch.equal(frozen[n], p) for n, p in net[0].state_dict().items())
    net[0].requires_grad_(True)
    added = nn.Linear(30, 30)
    with torch.no_grad():
        for p in added.parameters():
            p.fill_(0.5)
    optimizer.add_param_group({"params": list(added.parameters())})
    train(range(12, 20))
    optimizer.finish()
    assert not torch.equal(frozen["weight"], net[0].weight)
    for p in [*net.parameters(), *added.parameters()]:
        assert bool((gather(p.detach()) == p.detach()).all())


def check_frozen_while_delayed(
    rank: int, gather: Callable[[torch.Tensor], torch.Tensor], frozen_after: int
) -> None:
    """A layer that is frozen adopts the next average that is applied, and then keeps its bits.

    Its fragment's rounds begin after steps 2, 6, ..., and are applied one step later.
    """
    net = make_net()
    compressor = ALQ(bits=4, bucket_size=512, min_numel=1)
    streams = {"every": 4, "fragments": 2, "delay": 1}
    optimizer = LocalSGD(make_optimizer(net), compression=compressor, **streams, **OUTER)
    adopted: list[torch.Tensor] = []
    for step in range(1, 20):
        backward(net, rank, step)
        optimizer.step()
        if step == frozen_after:
            net[0].requires_grad_(False)
        if step == (3 if frozen_after == 2 else 7):
            adopted = [p.detach().clone() for p in net[0].parameters()]
            assert all(bool((gather(p) == p).all()) for p in adopted)
        for p, value in zip(net[0].parameters(), adopted, strict=False):
            assert torch.equal(p, value), step
    optimizer.finish()
    for p, value in zip(net[0].parameters(), adopted, strict=True):
        assert torch.equal(p, value)


def check_background(
    rank: int, ranks: int, wait: Callable[[], None], go: Callable[[], None]
) -> None:
    """A delayed round begins without the others.

    wait, go: The first rank's ``go`` ends the others' ``wait``.
    """
    net = make_net().double()
    optimizer = LocalSGD(make_optimizer(net), every=2, delay=1)
    backward(net, rank, 1)
    optimizer.step()
    backward(net, rank, 2)
    if rank:
        wait()
    optimizer.step()
    if not rank:
        go()
    backward(net, rank, 3)
    optimizer.step()
    assert optimizer.rounds == 1
    optimizer.finish()


def check_ranks_that_differ(rank: int) -> None:
    """In the delay of their rounds; all are told when the round is applied."""
    net = make_net()
    optimizer = LocalSGD(make_optimizer(net), every=4, delay=2 if rank else 1)
    with pytest.raises(RankMismatchError, match="every, fragments, delay, mixing"):
        for step in range(8):
            backward(net, rank, step)
            optimizer.step()


def check_changed_settings(rank: int, ranks: int) -> None:
    """``set`` while a round is in flight changes the next one, on all ranks."""
    net = make_net()
    compressor = QSGD(bits=8, bucket_size=512)
    optimizer = LocalSGD(make_optimizer(net), every=4, fragments=2, delay=2, compression=compressor)
    for step in range(1, 9):
        backward(net, rank, step)
        if step == 4:
            time.sleep(0.3 * rank)  # the first rank's round waits for the others
        optimizer.step()
        if step == 4:
            time.sleep(0.3 * rank)  # and those have sent it by now
            compressor.set(bits=4)
    optimizer.finish()
    assert compressor.report()["bits_per_coordinate"] < 6
