"""A plain simulation of all ranks of LocalSGD, whole or in fragments: in float64, or compressed by
``simulate.Ranks``, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from hvd_adaptive.hooks.ddp.buckets import by_bucket
from hvd_adaptive.simulate import Ranks
from hvd_adaptive.simulate import ranks as simulated_ranks

RATE = 0.1
# Of the net's parameters, of 3200, 80, 6400, 80, 1600 and 20 coordinates.
PARTS = {1: [[0, 1, 2, 3, 4, 5]], 2: [[0, 1], [2, 3, 4, 5]], 3: [[0, 1], [2], [3, 4, 5]]}


def make_net() -> nn.Module:
    """The same on every rank: three tensors large enough to be quantised, and biases."""
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(40, 80), nn.ReLU(), nn.Linear(80, 80), nn.ReLU(), nn.Linear(80, 20)
    )


def make_optimizer(net: nn.Module) -> torch.optim.Optimizer:
    """With a state of its own."""
    return torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.5)


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

    def _update(self, rank: int, step: int, sync: Any) -> None:
        sent = [group for group in self.layout.groups if self._is_sent(group)]
        samples = functools.partial(self._trips(rank, step).samples, sent)
        parts = self._exchanges[rank].parts_among(self.layout.groups)
        self._scheme._training.updates.run(step, samples, sync, parts, rank)


@dataclass
class Streaming:
    """All ranks of a training. Whoever has taken no step does not count.

    counts: Each rank's steps.  skipped: (rank, step) pairs that are no steps.
    compressor: None averages exactly, in float64.
    """

    counts: Sequence[int]
    starts: Sequence[int]
    every: int
    fragments: int = 1
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
            parts = [[members[i] for i in of] for of in reversed(PARTS[self.fragments])]
            return by_bucket(parts, in_turn=False, **bounds)

        named = [(str(i), p) for i, p in enumerate(self.carrier.parameters())]
        if self.fragments == 1:
            return Ranks(named, self.compressor, len(self.counts))
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
        active = sum(rank.has_moved[fragment] for rank in self.ranks)
        if not active:
            return
        part = PARTS[self.fragments][fragment]
        ways = [
            [rank.shared[i] - list(rank.net.parameters())[i] for i in part] for rank in self.ranks
        ]
        averages = [a * (len(self.ranks) / active) for a in self._averages(part, ways)]
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


def assert_equal(net: nn.Module, others: Sequence[torch.Tensor]) -> None:
    for own, other in zip(net.parameters(), others, strict=True):
        assert torch.equal(own, other)
