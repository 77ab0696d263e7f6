"""Define ServedParameters, an optimizer's parameters by slot and what it does with gradients."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hvd_adaptive.hooks.horovod.changed import Watch
from hvd_adaptive.hooks.horovod.owner import (
    Owner,
    calling_frame,
    calling_parameter,
    unhooked,
)

if TYPE_CHECKING:
    from hvd_adaptive.compressor import GradientCompressor
    from hvd_adaptive.layout import Member


class ServedParameters:
    """Hold the parameters that a compressor serves, by slot of the layout.

    Args:
        compressor: The compressor.
        owner: Its optimizer; None if none was found. Then there are no parameters.
        by_slot: The parameters.

    Attributes:
        by_slot: The parameters.
        optimizer: Function that returns Horovod's optimizer as long as it exists, or None.
    """

    def __init__(
        self,
        compressor: GradientCompressor,
        owner: Owner | None,
        by_slot: Sequence[torch.nn.Parameter],
    ) -> None:
        self._compressor, self.by_slot = compressor, by_slot
        find = None if owner is None else owner.optimizer
        self._has_optimizer = find is not None
        # A step in progress holds the optimizer weakly, so that it may be dropped meanwhile.
        self.optimizer: Callable[[], Any] = find or (lambda: None)
        self._sparse: set[int] | None = None
        self._count = -1  # of parameters in the optimizer's groups
        self._unhooked: list[tuple[str, torch.nn.Parameter]] = []
        # Gradients are looked for in the order of the previous step first.
        self._order = list(range(len(by_slot) - 1, -1, -1))
        self._seen: list[int] = []
        self._next = 0

    def begin_step(self, members: Sequence[Member]) -> Watch | None:
        """Begin a step, whose first gradient has been found.

        Returns:
            A watch of its gradients; None if no optimizer calls.
        """
        self._seen = self._seen[-1:]
        if self.optimizer() is None:
            return None
        scaler = self._compressor.settings.grad_scaler
        return Watch(members, self.by_slot, self.optimizer, scaler)

    def end_step(self) -> list[str]:
        """Note the order of gradients, and which ones are sparse.

        Returns:
            The names of parameters that have gradients, but no hook of Horovod's.
        """
        if self._seen != self._order:
            self._order = list(dict.fromkeys([*self._seen, *self._order]))
        self._seen, self._next = [], 0
        if self._sparse is None:
            gradients = enumerate(p.grad for p in self.by_slot)
            self._sparse = {slot for slot, g in gradients if g is not None and g.is_sparse}
        count, optimizer = 0, self.optimizer()
        if optimizer is None:
            return []
        for group in optimizer.param_groups:
            count += len(group["params"])
        if count != self._count:  # add_param_group was called
            self._count, self._unhooked = count, unhooked(optimizer)
        if not self._unhooked:
            return []
        return [name for name, p in self._unhooked if p.requires_grad and p.grad is not None]

    def slot_of(self, tensor: torch.Tensor) -> int | None:
        """Return the slot of the parameter whose gradient is ``tensor``, or None."""
        order, at, parameters = self._order, self._next, self.by_slot
        for _ in order:
            slot = order[at]
            at = at + 1 if at + 1 < len(order) else 0
            if parameters[slot].grad is tensor:
                self._next = at
                self._seen.append(slot)
                return slot
        self.is_called_by_its_optimizer()
        # Perhaps a dense copy of a sparse gradient.
        asked = calling_parameter(self._compressor)
        if asked is None or asked.grad is None or not asked.grad.is_sparse:
            return None
        found = next((slot for slot, p in enumerate(parameters) if p is asked), None)
        if found is not None:
            self._seen.append(found)
            self._next = (order.index(found) + 1) % len(order)
        return found

    def is_sparse(self, slot: int) -> bool:
        """Return whether Horovod exchanges the gradient itself, because it is sparse now."""
        gradient = self.by_slot[slot].grad
        return gradient is not None and gradient.is_sparse and not self.optimizer().sparse_as_dense

    def would_wait(self, slot: int) -> bool:
        """Return whether Horovod would wait for ever if another rank had this absent gradient: it
        would be sparse there, and dense zeros here."""
        return slot in (self._sparse or ()) and not self.optimizer().sparse_as_dense

    def resolved(self, slot: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` without the negative bit, which means that memory holds its negative.

        If it has the bit, a copy replaces the gradient, because ``set_`` would keep the bit.
        """
        if not tensor.is_neg():
            return tensor
        plain = tensor.detach().resolve_neg()
        if self.is_gradient(slot, tensor):
            self.by_slot[slot].grad = plain
        return plain

    def is_gradient(self, slot: int, tensor: torch.Tensor) -> bool:
        """Return whether the average may be written to ``tensor``: it is the gradient of the
        parameter in ``slot``, in an optimizer's call. hvd.allreduce must not change its input."""
        return self._has_optimizer and self.by_slot[slot].grad is tensor

    def is_called_by_its_optimizer(self) -> bool:
        """Return False if another optimizer calls because this one is gone, or never existed.

        Raises:
            RuntimeError: Another optimizer calls, and this one still exists.
        """
        frame = calling_frame(self._compressor)
        if frame is None or frame.f_locals["self"] is self.optimizer():
            return True
        if self.optimizer() is not None:
            gc.collect()  # Horovod's optimizers are rings of references
        if self.optimizer() is not None:
            raise RuntimeError(
                "one compressor serves one optimizer at a time, but two call this one: construct a "
                "compressor for each (or close() it before it serves another)"
            )
        return False
