"""Define a backward pass without arithmetic, and gradients made from random numbers."""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

# (name, shape) of each parameter, in the order of the forward pass.
Shapes = list[tuple[str, tuple[int, ...]]]


def heavy_tailed(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Return normal numbers whose scales are log-normal (float32)."""
    scales = torch.randn(tuple(shape), generator=generator).mul_(0.5).exp_()
    return torch.randn(tuple(shape), generator=generator).mul_(scales).mul_(1e-2)


class _Layer(torch.autograd.Function):
    """Pass the input on, and call the hooks of a parameter in the backward pass.

    The parameter's accumulator adds no gradient to ``grad``. The hooks are called after a pause.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parameter: Any, pause: float) -> torch.Tensor:
        ctx.pause = pause
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if ctx.pause:
            time.sleep(ctx.pause)
        return outer[0], None, None


class FakeNetwork(nn.Module):
    """A chain of layers with one parameter each. Hooks are called one by one, from the last layer
    to the first.

    Args:
        shapes: of the parameters.
        memory: values of all parameters (flat), which networks may share: nothing is learnt.
        variants: [variant][slot] gradients.
        seconds: of a backward pass, the same for all layers. The processor is free meanwhile.
    """

    def __init__(
        self,
        shapes: Shapes,
        memory: torch.Tensor,
        variants: list[list[torch.Tensor]],
        seconds: float = 0.0,
    ) -> None:
        super().__init__()
        sizes = [torch.Size(shape).numel() for _, shape in shapes]
        parts = zip(memory.split(sizes), shapes, strict=True)
        self.layers = nn.ParameterList(part.view(shape) for part, (_, shape) in parts)
        self.names = [name for name, _ in shapes]
        self.variants = variants
        self.pause = seconds / len(shapes)

    def fill(self, variant: int) -> None:
        """Set every ``grad`` to a copy of a variant's gradient, as a backward pass does."""
        for parameter, gradient in zip(self.layers, self.variants[variant], strict=True):
            parameter.grad = gradient.clone()

    def forward(self) -> torch.Tensor:
        """Return a scalar whose backward pass calls the hooks."""
        x = torch.zeros((), requires_grad=True)
        for parameter in self.layers:
            x = _Layer.apply(x, parameter, self.pause)
        return x

    def averages(self) -> list[Any]:
        """Return the gradients of all parameters, which averages have replaced."""
        return [parameter.grad for parameter in self.layers]

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """Return (name, parameter) in the order of the forward pass."""
        return list(zip(self.names, self.layers, strict=True))


class Still(torch.optim.SGD):
    """Update nothing, so that step() is the exchange alone."""

    # PyTorch's wrappers of these import torch._dynamo, which takes seconds.
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Leave the parameters as they are."""
