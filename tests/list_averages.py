"""Checks of average(), over Horovod and over torch.distributed.

``rank`` and ``ranks`` are fixtures of the folders of tests/parallel that import them.."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Sequence

import pytest
import torch
from states import through_disk
from torch import nn

from hvd_adaptive import ALQ, QSGD, RankMismatchError, average, instances
from hvd_adaptive.simulate import Ranks

module = sys.modules["hvd_adaptive.hooks.average"]

SHAPES = ((60, 50), (50,), (), (30, 100))
MAKERS = {
    "alq": lambda: ALQ(bits=3, bucket_size=512, update_steps=[0, 2], exchange="allgather"),
    "feedback": lambda: QSGD(bits=4, error_feedback=1.0, exchange="scatter_reduce"),
    "auto": lambda: QSGD(bits=3, error_feedback="auto", exchange="allgather"),
}


def drawn(rank: int, step: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[torch.Tensor]:
    """A rank's tensors: what ranks have in common, and what is their own."""
    both = []
    for seed in (7, 1000 * rank + step + 8):
        generator = torch.Generator().manual_seed(seed)
        both.append([torch.randn(shape, generator=generator) for shape in shapes])
    return [common + own for common, own in zip(*both, strict=True)]


def exact(ranks: int, step: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    everyone = [drawn(rank, step) for rank in range(ranks)]
    return [torch.stack(parts).to(dtype).mean(0) for parts in zip(*everyone, strict=True)]


@pytest.mark.parametrize("maker", MAKERS)
def test_bits_are_simulates(rank, ranks, maker):
    """Of four calls: tables are fitted, residuals kept, as in a training that simulate runs."""
    compressor, mirror = MAKERS[maker](), MAKERS[maker]()
    carrier = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    simulated = Ranks([(str(i), p) for i, p in enumerate(carrier)], mirror, ranks)
    for step in range(4):
        given = drawn(rank, step)
        kept = copy.deepcopy(given)
        averages = average(given, compressor)
        for other in range(ranks):
            for parameter, tensor in zip(carrier, drawn(other, step), strict=True):
                parameter.grad = tensor
            simulated.take(other)
        if simulated.due(step):
            simulated.refit(step)
        simulated.average(step)
        for result, parameter, own, before in zip(averages, carrier, given, kept, strict=True):
            assert torch.equal(result, parameter.grad) and torch.equal(own, before)
    assert compressor.step == 4 and compressor.report()["wire_bytes"] > 0


def test_none_counts_as_zeros(rank, ranks):
    """None on one rank counts as zeros; None on all ranks stays None."""
    compressor = QSGD(bits=8, norm="linf")
    for step in range(4):
        given: list = drawn(rank, step)
        wanted = exact(ranks, step)
        wanted[0] -= drawn(0, step)[0].double() / ranks
        if rank == 0:
            given[0] = None
        given[2] = None
        if step in (0, 2):
            given[3] = None
        averages = average(given, compressor)
        assert averages[2] is None and (averages[3] is None) == (step in (0, 2))
        for index in (0, 1, 3):
            if averages[index] is not None:
                error = averages[index].double() - wanted[index]
                assert error.norm() < 0.05 * wanted[index].norm()
    assert average([None, None], compressor) == [None, None]
    assert compressor.step == 4


def test_residuals_of_missing_tensors_are_kept(rank, ranks):
    """Everything sent, and the residual, is the sum of the gradients, though a call lacks one."""
    compressor = QSGD(bits=4, norm="linf", error_feedback=1.0, exchange="allgather")
    sums = [torch.zeros(60, 50, dtype=torch.float64) for _ in range(2)]
    for step in range(6):
        given: list = [drawn(rank, step)[0], None if step % 2 else drawn(rank, step)[3]]
        averages = average(given, compressor)
        for at, (total, place) in enumerate(zip(sums, (0, 3), strict=True)):
            if averages[at] is not None:
                wanted = exact(ranks, step)[place]
                total += (averages[at].double() - wanted).view(total.shape)
    residuals = compressor.state_dict()["residuals"]["parameters"]
    for name, total in zip(("0", "1"), sums, strict=True):
        own = residuals[name].double().view(total.shape)
        mean = average([own], QSGD(bits=8, warmup_steps=1))[0]
        torch.testing.assert_close(total, -mean, atol=1e-3, rtol=0)


DIFFERENT = {
    "number": "their number is 3 on rank 0, 4 on rank",
    "shape": r"tensors\[0\] is float32 \[60, 51\] on rank 0, float32 \[60, 50\] on rank",
    "dtype": r"tensors\[1\] is float64 \[50\] on rank 0, float32 \[50\] on rank",
    "gradient": r"tensors\[1\] is float32 \[50\], which requires a gradient on rank 0",
}


@pytest.mark.parametrize(
    ("differs", "async_op"), [*((differs, False) for differs in DIFFERENT), ("number", True)]
)
def test_lists_that_differ(rank, differs, async_op):
    """All ranks raise, and can go on."""
    compressor = QSGD(bits=4)
    average(drawn(rank, 0), compressor)
    given: list = drawn(rank, 0)
    if rank == 0:
        given = {
            "number": given[:3],
            "shape": [torch.zeros(60, 51), *given[1:]],
            "dtype": [given[0], given[1].double(), *given[2:]],
            "gradient": [given[0], given[1].clone().requires_grad_(), *given[2:]],
        }[differs]
    with pytest.raises(RankMismatchError, match=DIFFERENT[differs]):
        average(given, compressor, async_op=async_op).wait()
    average(drawn(rank, 0), compressor)
    assert compressor.step == 2


def test_settings_that_differ(rank):
    with pytest.raises(RankMismatchError, match="bits is 5 on rank 0, 4 on rank"):
        average(drawn(rank, 0), QSGD(bits=5 if rank == 0 else 4))


def test_asynchronous_calls(rank, ranks):
    """Several at once, of several compressors, have the bits of one after the other."""

    def run(async_op: bool) -> list[torch.Tensor]:
        instances.start_over()
        first, second = MAKERS["feedback"](), ALQ(bits=4)
        begun = []
        for step in range(3):
            for compressor in (first, second):
                given = drawn(rank, step)
                begun.append(average(given, compressor, async_op=async_op))
                for tensor in given:
                    tensor.zero_()
        ended = [begin.wait() for begin in begun] if async_op else begun
        if async_op:
            assert all(begin.is_completed() for begin in begun)
        return [tensor for averages in ended for tensor in averages]

    for one, other in zip(run(True), run(False), strict=True):
        assert torch.equal(one, other)


def test_calls_wait_for_averages_in_the_background(rank, ranks):
    """One that has begun keeps its settings and its step; a state has none that is half done."""
    compressor = QSGD(bits=8, norm="linf", error_feedback="auto")
    average(drawn(rank, 0), compressor)
    state, wanted = compressor.state_dict(), exact(ranks, 0)

    def begin():
        if rank == ranks - 1:
            time.sleep(0.1)  # the others wait for it
        return average(drawn(rank, 0), compressor, async_op=True)

    def check(begun) -> None:
        for result, mean in zip(begun.wait(), wanted, strict=True):
            assert (result.double() - mean).norm() <= 0.03 * mean.norm()

    begun = begin()
    assert compressor.state_dict()["step"] == 2
    check(begun)
    begun = begin()
    compressor.load_state_dict(state)
    check(begun)
    assert compressor.step == 1
    begun = begin()
    compressor.set(bits=2)
    check(begun)
    assert compressor.step == 2 and compressor.state_dict()["settings"] == {"bits": 2}
    begun = begin()
    assert copy.deepcopy(compressor).step == 3
    begun = begin()
    compressor.close()
    assert begun.is_completed() and compressor.step == 4


def test_tensors_that_change_shape(rank, caplog):
    """The first rank warns once that their residuals are lost."""
    compressor = QSGD(bits=4, error_feedback="auto")
    for step in range(6):
        average([torch.ones(2000 + 100 * (step % 3))], compressor)
    told = [r for r in caplog.records if "starts from zero" in r.getMessage()]
    assert len(told) == int(rank == 0)


def test_a_schedule_may_save_a_state_in_the_background(rank):
    """It is called by the average itself, which does not wait for itself."""
    saved = []
    compressor = QSGD(bits=4, schedule=lambda step: saved.append(compressor.state_dict()["step"]))
    begun = [average(drawn(rank, step), compressor, async_op=True) for step in range(3)]
    for averaging in begun:
        averaging.wait()
    assert saved == [0, 1, 2]


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("maker", MAKERS)
def test_inference_mode(rank, maker, async_op):
    """Every bit is as usual, always in it or in turn, and averages are ordinary tensors."""

    def run(modes: Sequence[bool]) -> list[torch.Tensor]:
        instances.start_over()
        compressor, found = MAKERS[maker](), []
        for step, mode in enumerate(modes):
            with torch.inference_mode(mode):
                given = drawn(rank, step)
                averages = average(given, compressor, async_op=async_op)
                compressor.load_state_dict(compressor.state_dict())
            found += averages.wait() if async_op else averages
        return found

    plain = run([False] * 4)
    for modes in ([True] * 4, [False, True, True, False], [True, False, True, False]):
        for one, other in zip(run(modes), plain, strict=True):
            assert torch.equal(one, other) and not one.is_inference()


def test_gradients_are_averaged(rank, ranks):
    """Gradients are the exact averages of the ranks' gradients, as stock's are.

    Stock's own backward pass cannot be run beside: its collectives have numbers for names, which
    differ once ranks have submitted different numbers of others.
    """
    own = [tensor.requires_grad_() for tensor in drawn(rank, 0)]
    weighted = [tensor * (k + 2) for k, tensor in enumerate(own)]
    compressor = QSGD(bits=8, norm="linf", bucket_size=64, exchange="allgather")
    averages = average([*weighted[:3], own[3].detach()], compressor)
    assert not averages[3].requires_grad
    sum(((rank + 1) * a * a.detach().cos()).sum() for a in averages[:3]).backward()
    for k, tensor in enumerate(own[:3]):
        exact = torch.stack([drawn(r, 0)[k].double() * (k + 2) for r in range(ranks)]).mean(0)
        wanted = (k + 2) * (ranks + 1) / 2 * exact.cos()
        assert (tensor.grad - wanted).norm() < 0.02 * wanted.norm()  # the averages' rounding
    assert compressor.step == 1
    with torch.no_grad():
        assert not average(drawn(rank, 0), compressor)[0].requires_grad
    with pytest.raises(ValueError, match="async_op=True"):
        average([own[0]], compressor, async_op=True)


@pytest.mark.parametrize("lacking", [(), (3, 4)])
def test_a_run_resumes(rank, lacking):
    """From a file, bit for bit, also if all ranks first lack a tensor, whose residual waits."""

    def run(compressor: object, steps: range) -> list[torch.Tensor]:
        found: list = []
        for step in steps:
            given: list = drawn(rank, step)
            found += average([*given[:3], None if step in lacking else given[3]], compressor)
        return [tensor for tensor in found if tensor is not None]

    for maker in MAKERS.values():
        instances.start_over()
        whole = run(maker(), range(6))
        instances.start_over()
        first = maker()
        begun = run(first, range(3))
        second = maker()
        second.load_state_dict(through_disk(first.state_dict()))
        for one, other in zip(whole, begun + run(second, range(3, 6)), strict=True):
            assert torch.equal(one, other)


def test_a_run_resumes_before_a_part_has_arrived(rank):
    """Its table of averages is fitted at its first step, as in the run that goes on. Only small
    tensors, in full precision, were of this part before."""
    named = [(name, nn.Parameter(torch.zeros(1))) for name in ("first", "small", "later")]

    def made() -> ALQ:
        instances.start_over()
        keywords = {"named_parameters": named, "parameter_bits": {"first": 4}}
        return ALQ(bits=3, exchange="scatter_reduce", **keywords)

    def run(compressor: ALQ, steps: range) -> list:
        found: list = []
        for step in steps:
            first, small, _, later = drawn(rank, step)
            found += average([first, small, later if step > 3 else None], compressor)
        return [tensor for tensor in found if tensor is not None]

    first, second = made(), made()
    run(first, range(3))
    second.load_state_dict(through_disk(first.state_dict()))
    for one, other in zip(run(first, range(3, 6)), run(second, range(3, 6)), strict=True):
        assert torch.equal(one, other)


def test_names(rank):
    """parameter_bits refers to the names of named_parameters."""
    net = nn.Sequential(nn.Linear(50, 60, bias=False), nn.Linear(60, 50, bias=False))
    named = list(net.named_parameters())
    compressor = QSGD(bits=4, named_parameters=named, parameter_bits={"1.*": None})
    given = [drawn(rank, 0)[0].view(p.shape) for _, p in named]
    coded, plain = average(given, compressor)
    again = average(given, QSGD(bits=4, warmup_steps=1))
    assert torch.equal(plain, again[1]) and not torch.equal(coded, again[0])
    with pytest.raises(ValueError, match="one for each of named_parameters, 2, not 1"):
        average(given[:1], compressor)


def test_dtypes(rank, ranks):
    """16 bits are added in float32; several dtypes share a call."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    given = [tensor.to(dtype) for tensor, dtype in zip(drawn(rank, 0), dtypes, strict=True)]
    averages = average(given, QSGD(bits=8, norm="linf"))
    for result, wanted, dtype in zip(averages, exact(ranks, 0), dtypes, strict=True):
        assert result.dtype == dtype
        assert (result.double() - wanted).norm() <= 0.03 * wanted.norm()


def test_average_with_a_new_compressor_each_time(rank, monkeypatch, caplog):
    """Such a loop is warned of once, on the first rank; one list for each of many compressors is
    not."""
    monkeypatch.setattr(module, "_thrown_away", module.ThrownAway())
    kept = [QSGD(bits=4) for _ in range(12)]
    for _ in range(2):
        for compressor in kept:
            average([torch.ones(30)], compressor)
    for _ in range(8):
        average([torch.ones(30)], QSGD(bits=4))
    average([torch.ones(30)], kept[0])
    assert "new compressor" not in caplog.text
    for _ in range(30):
        average([torch.ones(30)], QSGD(bits=4))
    told = [r for r in caplog.records if "a new compressor each time, 10 times" in r.getMessage()]
    assert len(told) == int(rank == 0)
    assert all("construct one before the loop" in r.getMessage() for r in told)
