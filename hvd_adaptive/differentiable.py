"""Give ``hvd.allreduce(tensor, compression=)`` the backward pass that it has without compression.

Stock Horovod differentiates the allreduce of what ``compress`` returns, which is a placeholder. So
the gradient of the result waits while Horovod's backward pass reduces the placeholder's gradient
(zeros), and is reduced after it, by the same operation, uncompressed.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from hvd_adaptive.base.tensors import wide_of

# What Horovod's autograd functions keep of their arguments.
ARGUMENTS = ("average", "op", "prescale_factor", "postscale_factor", "process_set")


class Differentiable:
    """The context of a tensor that requires a gradient; ``ctx`` is that for ``decompress``."""

    def __init__(self, ctx: Any) -> None:
        self.ctx = ctx
        self.arguments: dict[str, Any] = {}  # of the allreduce of the tensor
        # That of the result, between the two functions' backward passes.
        self.gradient: torch.Tensor | None = None

    def sent(self, tensor: torch.Tensor, placeholder: torch.Tensor) -> torch.Tensor:
        """Return the placeholder, a function of the tensor."""
        return _Sent.apply(tensor, placeholder, self)

    def received(self, output: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """Return the result, a function of the reduced placeholder."""
        node = output.grad_fn
        if node is None:  # of an operation that stock Horovod does not differentiate
            return result
        self.arguments = {name: getattr(node, name) for name in ARGUMENTS}
        return _Received.apply(output, result, self)


class _Sent(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, placeholder: torch.Tensor, state: Differentiable
    ) -> torch.Tensor:
        ctx.state = state
        return placeholder.view_as(placeholder)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, zeros: torch.Tensor) -> Any:
        state: Differentiable = ctx.state
        gradient, state.gradient = state.gradient, None
        if gradient is None:  # another result of a grouped allreduce has one
            return None, None, None
        allreduce = sys.modules["horovod.torch"].allreduce
        reduced = allreduce(gradient.to(wide_of(gradient.dtype)), **state.arguments)
        return reduced.to(gradient.dtype), None, None


class _Received(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, output: torch.Tensor, result: torch.Tensor, state: Differentiable
    ) -> torch.Tensor:
        ctx.state, ctx.like = state, output.new_zeros(output.shape)
        return result.view_as(result)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.state.gradient = gradient.contiguous()
        return ctx.like, None, None
