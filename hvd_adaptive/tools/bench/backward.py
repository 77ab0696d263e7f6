"""A backward pass without arithmetic: it fires the hooks of gradients that are there already."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

# (name, shape) of each parameter, in the order of the forward pass.
Shapes = list[tuple[str, tuple[int, ...]]]


class _Layer(torch.autograd.Function):
    """Passes its input on. Its parameter's accumulator gets no gradient to add to ``grad``, but its
    hooks are called as ever, after a pause."""

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
    """Layers in a row, of one parameter each: hooks fire one by one, from the last to the first.

    memory: all parameters' values (flat), shared by the networks of all methods, since nothing is
    learnt. variants: [variant][slot] gradients. seconds: of a backward pass, equal for all layers,
    in which the processor is free, as where a GPU computes.
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
        """Set every ``grad`` to a copy of a variant's, as new memory, as a backward pass would."""
        for parameter, gradient in zip(self.layers, self.variants[variant], strict=True):
            parameter.grad = gradient.clone()

    def forward(self) -> torch.Tensor:
        """A scalar whose backward pass fires the hooks."""
        x = torch.zeros((), requires_grad=True)
        for parameter in self.layers:
            x = _Layer.apply(x, parameter, self.pause)
        return x

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """(name, parameter) in the order of the forward pass."""
        return list(zip(self.names, self.layers, strict=True))


class Still(torch.optim.SGD):
    """Updates nothing: what step() takes is the exchange."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Leave the parameters as they are."""
