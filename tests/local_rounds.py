"""LocalSGD, beside a mirror of all ranks.

``rank``, ``ranks`` and ``gather`` are fixtures of tests/parallel's folders."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence

import pytest
import torch
from local_mirror import (
    Gather,
    Mirror,
    assert_equal,
    backward,
    make_net,
    make_optimizer,
    train_beside_mirror,
)
from scheme_cases import scheme
from torch import nn

from hvd_adaptive import ALQ, QSGD, LocalSGD, RankMismatchError, instances
from hvd_adaptive.run import worker

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


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("outer", OUTER)
def test_rounds_are_simulates(rank: int, ranks: int, scheme: str, outer: str) -> None:
    """Every bit of four rounds is simulate's: tables are fitted, residuals kept."""
    counts, make = [12] * ranks, SCHEMES[scheme]
    optimizer, net, mirror = train_beside_mirror(rank, counts, make, 3, **OUTER[outer])
    assert_equal(net, mirror.nets[0])
    assert optimizer.rounds == mirror.rounds == optimizer.compressor.step == 4
    report = optimizer.report()
    assert 0 < report["wire_bytes_per_step"] == report["wire_bytes"] / 3


@pytest.mark.parametrize("ended", [5, 6])
def test_ranks_may_end_apart(rank: int, ranks: int, ended: int) -> None:
    """Rank 0 takes 11 steps, the others fewer: whoever takes no step in a round does not count."""
    counts = [11] + [ended] * (ranks - 1)
    optimizer, net, mirror = train_beside_mirror(rank, counts, SCHEMES["alq"], 3, momentum=0.5)
    assert_equal(net, mirror.nets[0])
    assert optimizer.rounds == mirror.rounds == 4


def test_parameters_become_their_mean(rank: int, ranks: int) -> None:
    """Without compression parameters become the ranks' mean."""
    optimizer, net, mirror = train_beside_mirror(rank, [6] * ranks, None, 3)
    for a, b in zip(net.parameters(), mirror.nets[0].parameters(), strict=True):
        torch.testing.assert_close(a, b)
    sent = sum(4 * p.numel() for p in net.parameters()) * 2 * (ranks - 1) / ranks
    assert optimizer.report()["wire_bytes_per_step"] == pytest.approx(sent / 3)


NARROW = {torch.float16: 4e4, torch.bfloat16: 1e30}  # and what N times exceeds the dtype's range


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrow_dtypes_are_averaged_in_float32(rank: int, ranks: int, dtype: torch.dtype) -> None:
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


def test_a_run_resumes_within_a_round(rank: int) -> None:
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


@pytest.mark.parametrize("differs", TOLD)
def test_ranks_that_differ_are_told(rank: int, differs: str) -> None:
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


def test_an_overflow_on_one_rank(rank: int, ranks: int, gather: Gather) -> None:
    """Rank 0 overflows in its second step of eight: rounds and the program's own collectives stay
    together, and that step changes nothing."""
    net, mirror = make_net(), Mirror(ranks, None)
    optimizer = LocalSGD(make_optimizer(net), every=4)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    for step in range(8):
        backward(net, rank, step, scaler)
        if rank == 0 and step == 1:
            next(net.parameters()).grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        assert len(gather(torch.ones(1))) == ranks
        assert optimizer.rounds == (step + 1) // 4
        for other in range(ranks):
            if other or step != 1:
                mirror.train(other, step, 1)
        if step % 4 == 3:
            mirror.end_round()
    for a, b in zip(net.parameters(), mirror.nets[0].parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("act", ["raise", "skip"])
def test_a_rank_that_is_not_finite(rank: int, ranks: int, act: str) -> None:
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


def test_ranks_none_of_which_is_finite(rank: int) -> None:
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


def test_ranks_in_different_rounds_are_told(rank: int) -> None:
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


def test_ranks_that_wait_for_a_round_say_so(rank: int, ranks: int, monkeypatch, caplog) -> None:
    """Each with its number; the one that is late is silent."""
    optimizer = LocalSGD(make_optimizer(net := make_net()), every=1)
    backward(net, rank, 0)
    optimizer.step()  # ranks are together now
    monkeypatch.setattr(worker, "STALL", 0.3)
    backward(net, rank, 1)
    late = rank == ranks - 1
    if late:
        time.sleep(1.5)
    optimizer.step()
    told = [message for message in caplog.messages if "still waits" in message]
    assert len(told) == 0 if late else len(told) >= 2
    assert all(f"LocalSGD: rank {rank} still waits" in m and "round 1" in m for m in told)


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("label", ["alq-3", "alq-3-paper", "ecdq-2", "eden-2"])
def test_what_no_rank_has_moved_stays_as_it_is(
    rank: int, gather: Gather, label: str, outer: str
) -> None:
    """With error feedback, though schemes round zeros."""
    torch.manual_seed(4)
    table = nn.Parameter(torch.randn(2000, 8))
    before, own = table.detach().clone(), {"error_feedback": 0.3, "keep_zeros": True}
    compressor = scheme(label)(bucket_size=1024, **own)
    inner = torch.optim.SGD([table], lr=0.1)
    optimizer = LocalSGD(inner, every=2, compression=compressor, **OUTER[outer])
    for step in range(6):
        weights = torch.randn(2000, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        weights[::2] = 0.0
        optimizer.zero_grad()
        (table * weights).sum().backward()
        optimizer.step()
    optimizer.finish()
    assert torch.equal(table[::2], before[::2])
    assert (table[1::2] != before[1::2]).any(dim=1).all()
    assert bool((gather(table.detach()) == table).all())
