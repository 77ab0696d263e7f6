"""torch's modes and defaults: inference mode, default dtype and device, negative views."""

from __future__ import annotations

import functools
from contextlib import contextmanager, nullcontext

import horovod.torch as hvd
import pytest
import torch
from scheme_cases import scheme
from training import assert_same_everywhere, distributed, residuals_of

from hvd_adaptive import ScatterReduce, instances

SHAPES = {"a.weight": (60, 50), "a.bias": (50,), "b.weight": (1500,), "never": (40,)}
REDUCE = {"exchange": ScatterReduce(second_stage_bits=8)}
CASES = {
    "feedback": scheme("qsgd-4", error_feedback=0.5, min_numel=100),
    "alq": scheme("alq-4", update_steps=[0, 2], min_numel=100, **REDUCE),
    "ecdq": scheme("ecdq-3", update_steps=[0, 2]),
    "ecdq-scatter": scheme("ecdq-3", update_steps=[0, 2], **REDUCE),
}
STEPS = 4


@contextmanager
def other_defaults():
    torch.set_default_dtype(torch.float16)
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def values(name: str, step: int) -> torch.Tensor:
    seed = 1000 * step + 10 * hvd.rank() + list(SHAPES).index(name)
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(SHAPES[name], generator=generator, dtype=torch.float32, device="cpu")


def product(weight: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    return (weight * own).sum()


def trained(case: str, mode=nullcontext, step_mode=nullcontext, loss_of=product):
    """Gradients of each step and weights after a few steps of momentum, and the compressor."""
    instances.start_over()
    with mode():
        weights = {
            name: torch.nn.Parameter(torch.zeros(shape, dtype=torch.float32, device="cpu"))
            for name, shape in SHAPES.items()
        }
        compressor = CASES[case]()
        optimizer = distributed(weights, compressor, momentum=0.9)
        seen = []
        for step in range(STEPS):
            optimizer.zero_grad()
            used = [n for n in weights if n != "never" or step == STEPS - 1]
            sum(loss_of(weights[name], values(name, step)) for name in used).backward()
            with step_mode():
                optimizer.step()
            seen += [w.grad.detach().clone() for w in weights.values()]
        return [*seen, *(w.detach().clone() for w in weights.values())], compressor


@functools.cache
def plain(case: str):
    """What all else is to give."""
    return trained(case)[0]


def check_plain(case: str, **ways) -> object:
    found, compressor = trained(case, **ways)
    assert all(torch.equal(one, other) for one, other in zip(found, plain(case), strict=True))
    assert_same_everywhere(*found)
    return compressor


@pytest.mark.parametrize("case", CASES)
def test_steps_in_inference_mode(case):
    """As stock Horovod: optimizer.step() in inference mode, backward passes out of it, and steps in
    turn in it and not. A parameter without a gradient gets its zeros there."""
    turn = iter(range(STEPS))
    check_plain(case, step_mode=torch.inference_mode)
    check_plain(case, step_mode=lambda: torch.inference_mode(bool(next(turn) % 2)))


@pytest.mark.parametrize("case", CASES)
def test_defaults_change_nothing(case):
    """tests/unit/test_defaults.py looks at what is not run here."""
    compressor = check_plain(case, mode=other_defaults)
    for residual in residuals_of(compressor).values():
        assert residual.dtype == torch.float32 and residual.device.type == "cpu"
    CASES[case]().load_state_dict(compressor.state_dict())


class NegatedBackward(torch.autograd.Function):
    """(weight * own).sum(), whose gradient has the negative bit, as that of ``x.conj().imag``."""

    @staticmethod
    def forward(ctx, weight, own):
        ctx.own = own
        return (weight * own).sum()

    @staticmethod
    def backward(ctx, up):
        return torch._neg_view(-(up * ctx.own)), None


@pytest.mark.parametrize("case", CASES)
def test_negative_views(case):
    kept = []

    def loss_of(weight, own):
        weight.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad.is_neg()))
        return NegatedBackward.apply(weight, own)

    check_plain(case, loss_of=loss_of)
    assert any(kept)  # else nothing was tried
