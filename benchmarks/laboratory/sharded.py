"""A network for FSDP2 whose backward pass returns gradients that are there already."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from hvd_adaptive.tools.bench.backward import Shapes

# Consecutive parameters of a model form blocks of at least this size, which FSDP2 shards.
BLOCK = 2_000_000


class _Given(torch.autograd.Function):
    """Pass the input on; in the backward pass return a block's gradients after a pause."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, block: Block, *parameters: Any) -> torch.Tensor:
        ctx.block = block
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[Any, ...]:
        given = ctx.block.given
        if ctx.block.pause:
            time.sleep(ctx.block.pause * len(given))
        gradients, ctx.block.given = tuple(given), []
        return outer[0], None, *gradients


class Block(nn.Module):
    """Parameters that FSDP2 gathers and reduces together.

    pause: of each parameter in the backward pass, in seconds.  given: their next gradients.
    """

    def __init__(self, parameters: list[torch.Tensor], pause: float) -> None:
        super().__init__()
        self.weights = nn.ParameterList(parameters)
        self.pause, self.given = pause, list[torch.Tensor]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Given.apply(x, self, *self.weights)


class ShardedNetwork(nn.Module):
    """A chain of blocks; see ``bench.backward.FakeNetwork``, whose arguments these are.

    ``fill`` runs the forward pass, so that all-gathers of parameters are not timed.
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
        blocks: list[list[torch.Tensor]] = [[]]
        for part, (_, shape) in parts:
            if sum(weight.numel() for weight in blocks[-1]) >= BLOCK:
                blocks.append([])
            blocks[-1].append(part.view(shape))
        pause = seconds / len(shapes)
        self.blocks = nn.ModuleList(Block(weights, pause) for weights in blocks)
        self.variants = variants
        self._output = torch.zeros(())

    def fill(self, variant: int) -> None:
        """Set the next gradients, in new memory, and run the forward pass."""
        gradients = iter(self.variants[variant])
        for block in self.blocks:
            block.given = [next(gradients).clone() for _ in block.weights]
        self._output = self(torch.zeros((), requires_grad=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def output(self) -> torch.Tensor:
        """Return the forward pass's scalar."""
        return self._output

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """Return (name, parameter) in the order of the forward pass."""
        return list(self.named_parameters())

    def averages(self) -> list[torch.Tensor]:
        """Return the averaged gradients of all parameters, a collective."""
        grads: list[Any] = [parameter.grad for parameter in self.parameters()]
        return [grad.full_tensor() for grad in grads]
