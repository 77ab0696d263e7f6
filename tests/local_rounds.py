"""LocalSGD of all ranks in one process, by simulate and by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
    "start": r"different parameters \(2.weight of ranks? 1(-\d)? is not the first rank's\)",
    "bits": "bits is",
}
CHANGED = {
    "adds": "ranks have different parameters in the optimizer's groups",
    "replaces": "ranks have added, replaced or unfrozen different parameters in a round",
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


def backward(net: nn.Module, rank: int, step: int, scaler: Any = None) -> float:
    """A rank's gradients of its own data, scaled by a GradScaler if there is one."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(16, 40, generator=generator)
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
            net[2].weight[0, 0] += 1
    every = 3 if differs == "every" and first else 2
    compressor = QSGD(bits=5 if differs == "bits" and first else 4)
    optimizer = LocalSGD(
        make_optimizer(net),
        every=every,
        compression=compressor,
        named_parameters=net.named_parameters(),
    )
    with pytest.raises(RankMismatchError, match=TOLD[differs]):
        for step in range(every):
            backward(net, rank, step)
            optimizer.step()


def check_overflow(rank: int, ranks: int, collective: Callable[[], int]) -> None:
    """Rank 0 overflows in its second step of eight: rounds and the program's own collectives stay
    together, and that step changes nothing.

    collective: One of the program's own, which returns the number of ranks.
    """
    net, mirror = make_net(), Mirror(ranks, None)
    optimizer = LocalSGD(make_optimizer(net), every=4)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    for step in range(8):
        backward(net, rank, step, scaler)
        if rank == 0 and step == 1:
            next(net.parameters()).grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        assert collective() == ranks
        assert optimizer.rounds == (step + 1) // 4
        for other in range(ranks):
            if other or step != 1:
                mirror.train(other, step, 1)
        if step % 4 == 3:
            mirror.end_round()
    for a, b in zip(net.parameters(), mirror.nets[0].parameters(), strict=True):
        torch.testing.assert_close(a, b)


def check_changed_groups(rank: int, ranks: int, gather: Callable[[Tensor], Tensor]) -> None:
    """A layer is frozen, another unfrozen, and one is added: each is averaged as its ranks moved.

    gather: Returns all ranks' tensors of one shape, stacked.
    """
    net, added = make_net(), nn.Linear(20, 20)
    with torch.no_grad():
        for p in added.parameters():
            p.fill_(0.25)
    first, middle, last = net[0], net[2], net[4]
    middle.requires_grad_(False)
    inner = torch.optim.SGD(net.parameters(), lr=RATE)
    compressor = ALQ(bits=4, bucket_size=512, update_steps=[0])
    optimizer = LocalSGD(inner, every=2, momentum=0.9, lr=0.7, compression=compressor)
    generator = torch.Generator().manual_seed(rank)

    def train(steps: int, *layers: nn.Module) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            for p in (p for layer in layers for p in layer.parameters()):
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()

    def equal_on_all(layer: nn.Module) -> bool:
        flat = nn.utils.parameters_to_vector(layer.parameters()).detach()
        return bool((gather(flat) == flat).all())

    started = copy.deepcopy(middle.state_dict())
    train(4, first, last)
    assert all(torch.equal(started[n], p) for n, p in middle.state_dict().items())
    frozen = copy.deepcopy(first.state_dict())
    first.requires_grad_(False)
    middle.requires_grad_(True)
    optimizer.add_param_group({"params": list(added.parameters())})
    train(1, middle, added, last)
    # In the middle of the round, the exact mean of what is new after one more step.
    exact = [gather(p.detach()).double() for p in [*middle.parameters(), *added.parameters()]]
    draws = [torch.Generator() for _ in range(ranks)]
    states = gather(generator.get_state())
    for other, draw in enumerate(draws):
        draw.set_state(states[other].clone())
        for mean in exact:
            mean[other] -= RATE * torch.randn(mean.shape[1:], generator=draw).double()
    train(1, middle, added, last)
    for p, mean in zip([*middle.parameters(), *added.parameters()], exact, strict=True):
        torch.testing.assert_close(p.detach().double(), mean.mean(0), rtol=1e-5, atol=1e-6)
    assert all(torch.equal(frozen[n], p) for n, p in first.state_dict().items())
    train(4, middle, added, last)
    assert all(torch.equal(frozen[n], p) for n, p in first.state_dict().items())
    assert all(map(equal_on_all, (first, middle, last, added)))
    assert optimizer.rounds == 5
    # Frozen in the middle of a round, with steps already taken: averaged once, and then still.
    train(1, middle, last)
    middle.requires_grad_(False)
    train(1, last)
    assert equal_on_all(middle)
    frozen = copy.deepcopy(middle.state_dict())
    train(2, last)
    assert all(torch.equal(frozen[n], p) for n, p in middle.state_dict().items())


def check_replaced_parameter(rank: int, ranks: int, gather: Callable[[Tensor], Tensor]) -> None:
    """All ranks replace a parameter within a round, by numbers of their own. It becomes the exact
    mean once, and is averaged like the others from then on."""
    net = make_net()
    inner = make_optimizer(net)
    compressor = ALQ(bits=4, bucket_size=512, error_feedback=1.0)
    optimizer = LocalSGD(inner, every=2, momentum=0.9, lr=0.7, compression=compressor)

    def train(first: int, steps: int) -> None:
        for step in range(first, first + steps):
            backward(net, rank, step)
            optimizer.step()

    train(0, 3)
    members = inner.param_groups[0]["params"]
    place = next(i for i, p in enumerate(members) if p is net[2].weight)
    generator = torch.Generator().manual_seed(rank)
    net[2].weight = nn.Parameter(0.1 * torch.randn(80, 80, generator=generator))
    members[place] = net[2].weight
    backward(net, rank, 3)
    inner.step()
    exact = gather(net[2].weight.detach()).double().mean(0)
    for p in net.parameters():  # the step was taken
        p.grad = None
    optimizer.step()
    torch.testing.assert_close(net[2].weight.detach().double(), exact, rtol=1e-6, atol=1e-8)
    for begin in (4, 6):
        before = net[2].weight.detach().clone()
        train(begin, 2)
        assert not torch.equal(before, net[2].weight)
        for p in net.parameters():
            assert bool((gather(p.detach()) == p.detach()).all())
    assert optimizer.rounds == 4


def check_groups_that_differ(rank: int, act: str) -> None:
    """The first rank alone adds or replaces parameters: all are told."""
    net = make_net()
    inner = make_optimizer(net)
    optimizer = LocalSGD(inner, every=2)
    for step in range(3):
        backward(net, rank, step)
        optimizer.step()
    if rank == 0 and act == "adds":
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    if rank == 0 and act == "replaces":
        net[2].weight = inner.param_groups[0]["params"][2] = nn.Parameter(torch.ones(80, 80))
    backward(net, rank, 3)
    with pytest.raises(RankMismatchError, match=CHANGED[act]):
        optimizer.step()
    assert optimizer.rounds == 1


def check_not_finite(rank: int, ranks: int, act: str) -> None:
    """The last rank's parameters are NaN at the end of the second round."""
    broken = ranks - 1
    net, mirror = make_net(), Mirror(ranks, None)
    inner = make_optimizer(net)
    optimizer = LocalSGD(
        inner, every=2, on_nonfinite=act, named_parameters=list(net.named_parameters())
    )

    def train(begin: int, breaks: bool = False) -> None:
        for step in range(begin, begin + 2):
            backward(net, rank, step)
            if breaks and step > begin:
                with torch.no_grad():
                    net[2].weight[3, 4] = float("nan")
                    inner.state[net[2].weight]["momentum_buffer"][0, 0] = float("inf")
            optimizer.step()

    def equal(other: nn.Module) -> None:
        for a, b in zip(net.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b)

    train(0)
    for other in range(ranks):
        mirror.train(other, 0, 2)
    mirror.end_round()
    good = copy.deepcopy(net.state_dict())
    if act == "raise":
        with pytest.raises(FloatingPointError, match=f"2.weight of rank {broken}"):
            train(2, rank == broken)
        assert optimizer.rounds == 1
        net.load_state_dict(good)
        for state in inner.state.values():
            state["momentum_buffer"].zero_()
        train(4)  # the anchors have not changed
        assert optimizer.rounds == 2
    else:
        train(2, rank == broken)
        for other in range(ranks - 1):
            mirror.train(other, 2, 2)
        with torch.no_grad():  # it does not count
            for p, a in zip(mirror.nets[broken].parameters(), mirror.anchors, strict=True):
                p.copy_(a)
        mirror.end_round(ranks - 1)
        equal(mirror.nets[0])
        assert (net[2].weight in inner.state) == (rank != broken)
        train(4)
    assert all(p.isfinite().all() for p in net.parameters())


def check_none_is_finite(rank: int) -> None:
    """All ranks' parameters are NaN: an error, also of ``skip``, and anchors stay as they are."""
    net = make_net()
    optimizer = LocalSGD(make_optimizer(net), every=1, on_nonfinite="skip")
    backward(net, rank, 0)
    optimizer.step()
    good = copy.deepcopy(net.state_dict())
    backward(net, rank, 1)
    net[4].bias.grad[0] = float("nan")
    with pytest.raises(FloatingPointError, match="5 of rank 0, 5 of rank 1"):
        optimizer.step()
    assert optimizer.rounds == 1
    net.load_state_dict(good)
    optimizer.optimizer.state.clear()
    backward(net, rank, 2)
    optimizer.step()
    assert optimizer.rounds == 2
    assert all(p.isfinite().all() for p in net.parameters())


def check_unequal_counts(rank: int) -> None:
    """A rank that loads an older state is in another round, and all are told."""
    optimizer = LocalSGD(make_optimizer(net := make_net()), every=1)
    state = copy.deepcopy(optimizer.state_dict())
    backward(net, rank, 0)
    optimizer.step()
    if rank == 0:
        optimizer.load_state_dict(state)
    backward(net, rank, 1)
    with pytest.raises(RankMismatchError, match="different numbers of rounds"):
        optimizer.step()
