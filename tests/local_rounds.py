"""LocalSGD of all ranks in one process, by simulate and by hand."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hvd_adaptive import ALQ, QSGD, LocalSGD, RankMismatchError, instances
from hvd_adaptive.simulate import Ranks

RATE = 0.1
SCHEMES = {
    "alq": lambda: ALQ(bits=3, bucket_size=512, update_steps=[0, 2], exchange="allgather"),
    "feedback": lambda: QSGD(bits=4, error_feedback=1.0, exchange="scatter_reduce"),
    "auto": lambda: QSGD(bits=3, error_feedback="auto", exchange="allgather"),
}
OUTER = {"mean": {}, "diloco": {"momentum": 0.9, "lr": 0.7}}
TOLD = {
    "every": "disagree on LocalSGD's every",
    "start": "different parameters",
    "bits": "bits is",
}


def make_net() -> nn.Module:
    """The same on every rank: three tensors large enough to be quantised, and biases."""
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(40, 80), nn.ReLU(), nn.Linear(80, 80), nn.ReLU(), nn.Linear(80, 20)
    )


def make_optimizer(net: nn.Module) -> torch.optim.Optimizer:
    """With a state of its own."""
    return torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.5)


def backward(net: nn.Module, rank: int, step: int) -> float:
    """A rank's gradients of its own data."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(16, 40, generator=generator)
    net.zero_grad()
    loss = F.cross_entropy(net(x), x[:, :20].argmax(1))
    loss.backward()
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


def check_rounds(rank: int, ranks: int, scheme: str, outer: str) -> None:
    """Every bit of four rounds is simulate's: tables are fitted, residuals kept."""
    counts, make = [12] * ranks, SCHEMES[scheme]
    optimizer, net, mirror = train_beside_mirror(rank, counts, make, 3, **OUTER[outer])
    assert_equal(net, mirror.nets[0])
    assert optimizer.rounds == mirror.rounds == optimizer.compressor.step == 4
    report = optimizer.report()
    assert 0 < report["wire_bytes_per_step"] == report["wire_bytes"] / 3


def check_uneven_ends(rank: int, ranks: int, ended: int) -> None:
    """Rank 0 takes 11 steps, the others fewer: whoever takes no step in a round does not count."""
    counts = [11] + [ended] * (ranks - 1)
    optimizer, net, mirror = train_beside_mirror(rank, counts, SCHEMES["alq"], 3, momentum=0.5)
    assert_equal(net, mirror.nets[0])
    assert optimizer.rounds == mirror.rounds == 4


def check_mean(rank: int, ranks: int) -> None:
    """Without compression parameters become the ranks' mean."""
    optimizer, net, mirror = train_beside_mirror(rank, [6] * ranks, None, 3)
    for a, b in zip(net.parameters(), mirror.nets[0].parameters(), strict=True):
        torch.testing.assert_close(a, b)
    sent = sum(4 * p.numel() for p in net.parameters()) * 2 * (ranks - 1) / ranks
    assert optimizer.report()["wire_bytes_per_step"] == pytest.approx(sent / 3)


NARROW = {torch.float16: 4e4, torch.bfloat16: 1e30}  # and what N times exceeds the dtype's range


def check_narrow_dtypes(rank: int, ranks: int, dtype: torch.dtype) -> None:
    """Averages of 16 bits are of float32 sums, rounded once: of large and of the smallest numbers.
    A step moves parameters from 0 by the rank's own numbers."""
    drawn = torch.randn(ranks, 300, generator=torch.Generator().manual_seed(3))
    drawn = torch.cat([drawn * 1e-6, drawn.sign() * NARROW[dtype]], dim=1).to(dtype)
    moved = torch.nn.Parameter(torch.zeros(600, dtype=dtype))
    optimizer = LocalSGD(torch.optim.SGD([moved], lr=1.0), every=1)
    moved.grad = drawn[rank].clone()
    optimizer.step()
    exact = -drawn.double().mean(dim=0)
    # Half a unit in the last place, which is at least half the smallest number.
    info = torch.finfo(dtype)
    unit = torch.maximum(exact.abs() * info.eps, torch.tensor(info.smallest_normal * info.eps))
    assert ((moved.detach().double() - exact).abs() <= 0.51 * unit).all()
    ring = 4 * moved.numel() * 2 * (ranks - 1) / ranks
    assert optimizer.report()["wire_bytes_per_step"] == pytest.approx(ring)


def check_resumed_runs(rank: int) -> None:
    """Saved within a round by every rank, and loaded, residuals included."""

    def made() -> tuple[nn.Module, LocalSGD]:
        net = make_net()
        instances.start_over()
        compressor = SCHEMES["auto"]()
        return net, LocalSGD(make_optimizer(net), every=3, momentum=0.9, compression=compressor)

    def train(steps: Sequence[int], net: nn.Module, optimizer: LocalSGD) -> None:
        for step in steps:
            backward(net, rank, step)
            optimizer.step()

    whole, optimizer = made()
    train(range(10), whole, optimizer)
    optimizer.finish()
    net, optimizer = made()
    train(range(5), net, optimizer)
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    net, optimizer = made()
    net.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(range(5, 10), net, optimizer)
    optimizer.finish()
    assert optimizer.rounds == 4
    assert_equal(net, whole)


def check_ranks_that_differ(rank: int, differs: str) -> None:
    """All of them are told."""
    first, net = rank == 0, make_net()
    if differs == "start" and first:
        with torch.no_grad():
            next(net.parameters())[0, 0] += 1
    every = 3 if differs == "every" and first else 2
    compressor = QSGD(bits=5 if differs == "bits" and first else 4)
    optimizer = LocalSGD(make_optimizer(net), every=every, compression=compressor)
    with pytest.raises(RankMismatchError, match=TOLD[differs]):
        for step in range(every):
            backward(net, rank, step)
            optimizer.step()
