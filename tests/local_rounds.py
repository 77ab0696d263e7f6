"""LocalSGD, whole or in fragments, beside a plain simulation of all ranks.

``rank``, ``ranks`` and ``gather`` are fixtures of tests/parallel's folders."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from list_averages import MAKERS
from scheme_cases import scheme
from states import through_disk
from streaming_simulation import (
    Streaming,
    assert_close,
    assert_equal,
    backward,
    make_net,
    make_optimizer,
)
from torch import nn

from hvd_adaptive import ALQ, QSGD, LocalSGD, RankMismatchError, instances

# every, fragments, delay, mixing: and the steps of a period after which rounds begin.
CASES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "whole": ({"every": 3, "fragments": 1}, (3,)),
    "in turn": ({"every": 5, "fragments": 2}, (3, 5)),
    "delayed": ({"every": 6, "fragments": 3, "delay": 1}, (2, 4, 6)),
    "until the next": ({"every": 6, "fragments": 2, "delay": 3, "mixing": 0.25}, (3, 6)),
    "discarded": ({"every": 4, "fragments": 2, "delay": 2, "mixing": 0.0}, (2, 4)),
    "whole and delayed": ({"every": 3, "fragments": 1, "delay": 3}, (3,)),
}
OUTER = {"mean": {}, "diloco": {"momentum": 0.9, "lr": 0.7}}
TOLD = {
    "every": "disagree on LocalSGD's every",
    "delay": "every, fragments, delay, mixing",
    "start": r"different parameters \(2.weight of ranks? 1(-\d)? is not the first rank's\)",
    "bits": "bits is",
}


def check_simulation(
    rank: int,
    counts: Sequence[int],
    case: str,
    make: Any = None,
    outer: str = "diloco",
    skipped: frozenset[tuple[int, int]] = frozenset(),
    **own: Any,
) -> LocalSGD:
    """The parameters after every step, and after the last round, of all ranks.

    counts: Each rank's steps.  skipped: (rank, step) pairs that are no steps.
    make: Makes a compressor, then every bit is the simulation's; None averages float64.
    """
    keywords, starts = CASES[case]
    compressor = make and make()
    keywords = keywords | OUTER[outer]
    sim = Streaming(counts, starts, **keywords, skipped=skipped, compressor=make and make())
    sim.run()
    net = make_net() if make else make_net().double()
    optimizer = LocalSGD(make_optimizer(net), **keywords, **{"compression": compressor} | own)
    compare = assert_equal if make else assert_close
    for step in range(1, counts[rank] + 1):
        if (rank, step) in skipped:
            optimizer.skip()
        else:
            train(rank, [step], net, optimizer)
        compare(net, sim.history[step, rank])
    optimizer.finish()
    for other in sim.ranks:
        compare(net, list(other.net.parameters()))
    assert optimizer.rounds == sim.rounds
    return optimizer


def train(rank: int, steps: Iterable[int], net: nn.Module, optimizer: LocalSGD) -> None:
    for step in steps:
        backward(net, rank, step)
        optimizer.step()


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("case", CASES)
def test_rounds_are_those_of_a_plain_simulation(rank, ranks, case, outer):
    check_simulation(rank, [14] * ranks, case, None, outer)


@pytest.mark.parametrize("scheme", MAKERS)
@pytest.mark.parametrize(
    ("case", "outer"), [("whole", "mean"), ("whole", "diloco"), ("delayed", "diloco")]
)
def test_compressed_rounds_are_simulates(rank, ranks, case, outer, scheme):
    """Tables are fitted, residuals kept."""
    optimizer = check_simulation(rank, [14] * ranks, case, MAKERS[scheme], outer)
    report, (keywords, starts) = optimizer.report(), CASES[case]
    assert optimizer.compressor.step == optimizer.rounds
    every = keywords["every"] / len(starts)
    assert 0 < report["wire_bytes_per_step"] == report["wire_bytes"] / every


@pytest.mark.parametrize("make", [None, MAKERS["auto"]], ids=["plain", "auto"])
@pytest.mark.parametrize("case", ["whole", "until the next"])
def test_inference_mode(rank, case, make):
    """Every bit is as usual if LocalSGD is constructed, steps or loads a state in it, at times."""

    def run(modes: Sequence[bool]) -> list[torch.Tensor]:
        instances.start_over()
        net = make_net()
        with torch.inference_mode(modes[0]):
            inner = torch.optim.SGD(net.parameters(), lr=0.1)
            optimizer = LocalSGD(inner, **CASES[case][0], momentum=0.5, compression=make and make())
        for step in range(10):
            backward(net, rank, step)
            with torch.inference_mode(modes[step % len(modes)]):
                optimizer.step()
                optimizer.load_state_dict(optimizer.state_dict())
        optimizer.finish()
        return [parameter.detach() for parameter in net.parameters()]

    plain = run([False])
    for modes in ([True], [False, True, True], [True, False]):
        assert all(map(torch.equal, run(modes), plain))


@pytest.mark.parametrize("case", ["whole", "in turn", "delayed", "until the next"])
@pytest.mark.parametrize("first", [5, 13])
def test_ranks_may_end_apart(rank, ranks, case, first):
    """One rank takes other numbers of steps; another skips one."""
    make, skipped = MAKERS["alq"] if case == "whole" else None, frozenset({(1, 4)})
    check_simulation(rank, [first, *[10] * (ranks - 1)], case, make, skipped=skipped)


NARROW = {torch.float16: 4e4, torch.bfloat16: 1e30}  # and what N times exceeds the dtype's range


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrow_dtypes_are_averaged_in_float32(rank, ranks, dtype):
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


@pytest.mark.parametrize(
    ("case", "saved_at"),
    [("whole", 5), ("until the next", 2), ("until the next", 4), ("until the next", 7)],
)
def test_a_run_resumes(rank, case, saved_at):
    """Saved within a round by every rank, with a round in flight or not; loaded by new objects,
    residuals included: the same bits."""

    def made() -> tuple[nn.Module, LocalSGD]:
        net = make_net()
        instances.start_over()
        compressor = ALQ(bits=3, bucket_size=512, error_feedback="auto", update_steps=[0, 3])
        keywords = CASES[case][0] | OUTER["diloco"]
        return net, LocalSGD(make_optimizer(net), compression=compressor, **keywords)

    whole, optimizer = made()
    train(rank, range(15), whole, optimizer)
    optimizer.finish()
    net, optimizer = made()
    train(rank, range(saved_at), net, optimizer)
    saved = through_disk({"net": net.state_dict(), "optimizer": optimizer.state_dict()})
    assert (saved["optimizer"]["pending"] is not None) == (case != "whole" and saved_at > 2)
    net, optimizer = made()
    net.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"])
    train(rank, range(saved_at, 15), net, optimizer)
    optimizer.finish()
    assert_equal(net, list(whole.parameters()))


def test_its_compressor_waits_for_a_round_in_the_background(rank, ranks):
    compressor, net = QSGD(bits=4), make_net()
    optimizer = LocalSGD(make_optimizer(net), every=2, delay=1, compression=compressor)
    if rank == ranks - 1:
        time.sleep(0.1)  # the others wait for it
    train(rank, [1, 2], net, optimizer)
    assert compressor.state_dict()["step"] == 1
    optimizer.finish()


@pytest.mark.parametrize("differs", TOLD)
def test_ranks_that_differ_are_told(rank, differs):
    """All of them are told; of delays when the round is applied."""
    first, net = rank == 0, make_net()
    if differs == "start" and first:
        with torch.no_grad():
            net[2].weight[0, 0] += 1
    every = 3 if differs == "every" and first else 2
    optimizer = LocalSGD(
        make_optimizer(net),
        every=every,
        delay=0 if differs != "delay" else 1 + first,
        compression=QSGD(bits=5 if differs == "bits" and first else 4),
        named_parameters=net.named_parameters(),
    )
    with pytest.raises(RankMismatchError, match=TOLD[differs]):
        train(rank, range(2 * every if differs == "delay" else every), net, optimizer)


@pytest.mark.parametrize(
    ("keywords", "starts"),
    [({"every": 4}, (4,)), ({"every": 4, "fragments": 2, "delay": 1}, (2, 4))],
    ids=["whole", "fragments"],
)
def test_an_overflow_on_one_rank(rank, ranks, gather, keywords, starts):
    """Rank 0 overflows in its second step of eight: rounds and the program's own collectives stay
    together, and that step changes nothing."""
    sim = Streaming([8] * ranks, starts, **keywords, skipped=frozenset({(0, 2)}))
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
        assert len(gather(torch.ones(1))) == ranks
        assert_close(net, sim.history[step, rank])
    assert scaler.get_scale() == (4.0 if rank == 0 else 8.0)
    optimizer.finish()
    assert_close(net, list(sim.ranks[0].net.parameters()))
    assert optimizer.rounds == sim.rounds


@pytest.mark.parametrize("act", ["raise", "skip"])
def test_a_rank_that_is_not_finite(rank, ranks, act):
    """The last rank's parameters are NaN at the end of the second round."""
    broken, net = ranks - 1, make_net().double()
    inner = make_optimizer(net)
    optimizer = LocalSGD(
        inner, every=2, on_nonfinite=act, named_parameters=list(net.named_parameters())
    )
    train(rank, [1, 2, 3], net, optimizer)
    good = copy.deepcopy(net.state_dict())
    backward(net, rank, 4)
    if rank == broken:
        with torch.no_grad():
            net[2].weight[3, 4] = float("nan")
            inner.state[net[2].weight]["momentum_buffer"][0, 0] = float("inf")
    if act == "raise":
        with pytest.raises(FloatingPointError, match=f"2.weight of rank {broken}"):
            optimizer.step()
        assert optimizer.rounds == 1
        net.load_state_dict(good)
        for state in inner.state.values():
            state["momentum_buffer"].zero_()
    else:
        optimizer.step()
        sim = Streaming([*[4] * broken, 2], (2,), every=2)  # it does not count
        sim.run()
        assert_close(net, list(sim.ranks[rank].net.parameters()))
        assert (net[2].weight in inner.state) == (rank != broken)
    train(rank, [5, 6], net, optimizer)  # the anchors have not changed
    assert optimizer.rounds == (2 if act == "raise" else 3)
    assert all(p.isfinite().all() for p in net.parameters())


def test_ranks_none_of_which_is_finite(rank):
    """All ranks' parameters are NaN: an error, also of ``skip``, and anchors stay as they are."""
    net = make_net()
    optimizer = LocalSGD(make_optimizer(net), every=1, on_nonfinite="skip")
    train(rank, [0], net, optimizer)
    good = copy.deepcopy(net.state_dict())
    backward(net, rank, 1)
    net[4].bias.grad[0] = float("nan")
    with pytest.raises(FloatingPointError, match="5 of rank 0, 5 of rank 1"):
        optimizer.step()
    assert optimizer.rounds == 1
    net.load_state_dict(good)
    optimizer.optimizer.state.clear()
    train(rank, [2], net, optimizer)
    assert optimizer.rounds == 2
    assert all(p.isfinite().all() for p in net.parameters())


def test_ranks_in_different_rounds_are_told(rank):
    """A rank that loads an older state is in another round, and all are told."""
    optimizer = LocalSGD(make_optimizer(net := make_net()), every=1)
    state = copy.deepcopy(optimizer.state_dict())
    train(rank, [0], net, optimizer)
    if rank == 0:
        optimizer.load_state_dict(state)
    with pytest.raises(RankMismatchError, match="different numbers of rounds"):
        train(rank, [1], net, optimizer)


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("label", ["alq-3", "alq-3-paper", "ecdq-2", "eden-2"])
def test_what_no_rank_has_moved_stays_as_it_is(rank, gather, label, outer):
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
