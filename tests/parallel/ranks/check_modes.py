"""torch's modes and defaults: inference mode, default dtype and device, negative views."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import horovod.torch as hvd
import pytest
import torch
from conftest import assert_same_everywhere
from rank_optimizers import distributed
from scheme_cases import scheme

from hvd_adaptive import QSGD, ScatterReduce, instances

SHAPES = {"a.weight": (60, 50), "a.bias": (50,), "b.weight": (1500,), "never": (40,)}
SCHEMES = {
    "feedback": scheme("qsgd-4", error_feedback=0.5, min_numel=100),
    "alq": scheme("alq-4", update_steps=[0, 2], min_numel=100),
    "ecdq": scheme("ecdq-3", update_steps=[0, 2]),
}
EXCHANGES = {
    "allgather": {},
    "scatter_reduce": {"exchange": ScatterReduce(second_stage_bits=8)},
}


@functools.cache
def plain(scheme: str, exchange: str):
    """What all else is to give."""
    return trained(lambda: SCHEMES[scheme](**EXCHANGES[exchange]), nullcontext)


@contextmanager
def defaults(dtype: torch.dtype, device: str) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def values(name: str, step: int, rank: int) -> torch.Tensor:
    seed = 1000 * step + 10 * rank + list(SHAPES).index(name)
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(SHAPES[name], generator=generator, dtype=torch.float32, device="cpu")


def trained(construct, mode, around=nullcontext, step_mode=nullcontext, steps: int = 4, view=None):
    """Weights after a few steps of momentum, and the gradients of each."""
    instances.start_over()
    with mode():
        weights = {
            name: torch.nn.Parameter(torch.zeros(shape, dtype=torch.float32, device="cpu"))
            for name, shape in SHAPES.items()
        }
        compressor = construct()
        optimizer = distributed(weights, compressor, momentum=0.9)
        seen = []
        for step in range(steps):
            optimizer.zero_grad()
            used = {n: w for n, w in weights.items() if n != "never" or step == steps - 1}
            loss = 0
            for name, weight in used.items():
                own = values(name, step, hvd.rank())
                loss = loss + (view(weight, own) if view else (weight * own).sum())
            loss.backward()
            with step_mode():
                optimizer.step()
            seen.append([w.grad.detach().clone() for w in weights.values()])
        return {n: w.detach().clone() for n, w in weights.items()}, seen, compressor


def assert_equal(first, second) -> None:
    for name, weight in first[0].items():
        assert torch.equal(weight, second[0][name]), name
        assert_same_everywhere(weight, f"modes.{name}")
    for step, (one, other) in enumerate(zip(first[1], second[1], strict=True)):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), step


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_steps_in_inference_mode(scheme, exchange):
    """As stock Horovod: optimizer.step() in inference mode, backward passes out of it, and steps in
    turn in it and not. A parameter without a gradient gets its zeros there."""
    construct, turn = lambda: SCHEMES[scheme](**EXCHANGES[exchange]), iter(range(100))

    def every_other():
        return torch.inference_mode() if next(turn) % 2 else nullcontext()

    first = plain(scheme, exchange)
    assert_equal(trained(construct, nullcontext, step_mode=torch.inference_mode), first)
    assert_equal(trained(construct, nullcontext, step_mode=every_other), first)


def test_stock_steps_in_inference_mode():
    """What the test above compares with: Horovod alone does."""
    construct = lambda: hvd.Compression.none  # noqa: E731
    first = trained(construct, nullcontext)
    inside = trained(construct, nullcontext, step_mode=torch.inference_mode)
    for name, weight in first[0].items():
        torch.testing.assert_close(inside[0][name], weight)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("dtype", "device"),
    [
        (torch.float64, "cpu"),
        (torch.float16, "cpu"),
        (torch.bfloat16, "cpu"),
        (torch.float32, "meta"),
    ],
)
def test_defaults_change_nothing(scheme, exchange, dtype, device):
    construct = lambda: SCHEMES[scheme](**EXCHANGES[exchange])  # noqa: E731
    first = plain(scheme, exchange)
    second = trained(construct, lambda: defaults(dtype, device))
    assert_equal(second, first)
    told = second[2].state_dict().get("residuals", {"parameters": {}})["parameters"]
    assert all(r.dtype == torch.float32 and r.device.type == "cpu" for r in told.values())
    again = construct()
    again.load_state_dict(second[2].state_dict())


class NegatedBackward(torch.autograd.Function):
    """(weight * own).sum(), whose gradient has the negative bit, as that of ``x.conj().imag``."""

    @staticmethod
    def forward(ctx, weight, own):
        ctx.own = own
        return (weight * own).sum()

    @staticmethod
    def backward(ctx, up):
        return torch._neg_view(-(up * ctx.own)), None


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_negative_views(scheme, exchange):
    construct = lambda: SCHEMES[scheme](**EXCHANGES[exchange])  # noqa: E731
    kept = []

    def view(weight, own):
        loss = NegatedBackward.apply(weight, own)
        weight.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad.is_neg()))
        return loss

    assert_equal(trained(construct, nullcontext, view=view), plain(scheme, exchange))
    assert any(kept)  # else nothing was tried


def test_negative_views_of_allreduce():
    """Out of an optimizer, and in an integer's or a complex number's way: stock's."""
    own = torch.arange(3000.0) * (1 + hvd.rank())
    average = torch.arange(3000.0) * (1 + hvd.size()) / 2
    view = torch._neg_view(-own)
    compressor = QSGD(bits=8, norm="linf", min_numel=5000)
    result = hvd.allreduce(view, compression=compressor, name="negative")
    assert torch.equal(result, average)
