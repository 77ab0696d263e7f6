"""LocalSGD of all ranks in one process, by simulate and by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hvd_adaptive import LocalSGD
from hvd_adaptive.simulate import Ranks

RATE = 0.1
# Returns all ranks' tensors of one shape, stacked.
Gather = Callable[[torch.Tensor], torch.Tensor]


def make_net() -> nn.Module:
    """The same on every rank: three tensors large enough to be quantised, and biases."""
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(40, 80), nn.ReLU(), nn.Linear(80, 80), nn.ReLU(), nn.Linear(80, 20)
    )


def make_optimizer(net: nn.Module) -> torch.optim.Optimizer:
    """With a state of its own."""
    return torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.5)


def backward(net: nn.Module, rank: int, step: int, scaler: Any = None) -> float:
    """A rank's gradients of its own data, scaled by a GradScaler if there is one."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(16, 40, generator=generator).to(next(net.parameters()).dtype)
    net.zero_grad()
    loss = F.cross_entropy(net(x), x[:, :20].argmax(1))
    (loss if scaler is None else scaler.scale(loss)).backward()
    return loss.item()


@dataclass
class Mirror:
    """All ranks of a training with LocalSGD.

    compressor: None averages exactly.
    """

    ranks: int
    compressor: object
    momentum: float = 0.0
    lr: float = 1.0
    rounds: int = 0
    nets: list[nn.Module] = field(default_factory=list)
    buffers: list[torch.Tensor] | None = None

    def __post_init__(self) -> None:
        self.nets = [make_net() for _ in range(self.ranks)]
        self.optimizers = [make_optimizer(net) for net in self.nets]
        self.carrier = make_net()
        named = [(str(i), p) for i, p in enumerate(self.carrier.parameters())]
        self.exchange = None
        if self.compressor is not None:
            self.exchange = Ranks(named, self.compressor, self.ranks)
        self.anchors = [p.detach().clone() for p in self.carrier.parameters()]

    def train(self, rank: int, first: int, steps: int) -> None:
        """Steps of one rank alone."""
        for step in range(first, first + steps):
            backward(self.nets[rank], rank, step)
            self.optimizers[rank].step()

    @torch.no_grad()
    def end_round(self, active: int | None = None) -> None:
        """Average, and move the anchors by Nesterov's rule."""
        moved = [
            [a - p for a, p in zip(self.anchors, net.parameters(), strict=True)]
            for net in self.nets
        ]
        averages = self._averages(moved)
        averages = [a * (self.ranks / (active or self.ranks)) for a in averages]
        if self.momentum:
            if self.buffers is None:
                self.buffers = [a.clone() for a in averages]
            else:
                for buffer, a in zip(self.buffers, averages, strict=True):
                    buffer.mul_(self.momentum).add_(a)
            pairs = zip(averages, self.buffers, strict=True)
            averages = [a.add(buffer, alpha=self.momentum) for a, buffer in pairs]
        for anchor, a in zip(self.anchors, averages, strict=True):
            anchor.add_(a, alpha=-self.lr)
        for net in self.nets:
            for parameter, anchor in zip(net.parameters(), self.anchors, strict=True):
                parameter.copy_(anchor)
        self.rounds += 1

    def _averages(self, moved: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        if self.exchange is None:
            return [torch.stack(parts).mean(0) for parts in zip(*moved, strict=True)]
        for rank, own in enumerate(moved):
            for parameter, tensor in zip(self.carrier.parameters(), own, strict=True):
                parameter.grad = copy.deepcopy(tensor)
            self.exchange.take(rank)
        if self.exchange.due(self.rounds):
            self.exchange.refit(self.rounds)
        self.exchange.average(self.rounds)
        return [p.grad.clone() for p in self.carrier.parameters()]


def train_beside_mirror(
    rank: int,
    counts: Sequence[int],
    make: object,
    every: int,
    process_set: object = None,
    **keywords: float,
) -> tuple[LocalSGD, nn.Module, Mirror]:
    """Train this rank with LocalSGD, and all ranks in a mirror.

    counts: Each rank's steps.
    make: Makes a compressor, or None.
    keywords: momentum and lr.
    """
    net, mirror = make_net(), Mirror(len(counts), make and make(), **keywords)
    optimizer = LocalSGD(
        make_optimizer(net),
        every=every,
        compression=make and make(),
        process_set=process_set,
        **keywords,
    )
    for step in range(counts[rank]):
        backward(net, rank, step)
        optimizer.step()
    optimizer.finish()
    for begin in range(0, max(counts), every):
        taken = [max(0, min(every, count - begin)) for count in counts]
        for other, steps in enumerate(taken):
            mirror.train(other, begin, steps)
        mirror.end_round(sum(steps > 0 for steps in taken))
    return optimizer, net, mirror


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    """Parameters of two models, bit for bit."""
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
