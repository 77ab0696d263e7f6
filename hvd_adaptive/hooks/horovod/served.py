"""Define ServedParameters, an optimizer's parameters by slot, and Watch, which detects changes.

After ``model.double()`` between two steps groups are laid out anew. A change of a gradient between
``backward`` and ``optimizer.step`` is too late: the gradient may have been sent.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import torch

from hvd_adaptive.hooks.horovod.owner import Owner, calling_frame, calling_parameter, unhooked
from hvd_adaptive.layout import Layout, Member

if TYPE_CHECKING:
    from hvd_adaptive.compressor import GradientCompressor
    from hvd_adaptive.layout import Member

CHANGED_TOO_LATE = (
    "%s%s: the gradient was changed between backward() and optimizer.step(): the change is lost, "
    "or counts for this rank's share of the average only. Call optimizer.synchronize() before "
    "gradients are clipped, unscaled or changed in another way, then step in "
    "`with optimizer.skip_synchronize():`"
)

# Frames from ``decompress`` up to ``GradScaler.step``, with room for wrappers of ``step``.
FRAMES = 24


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype that a parameter's gradient will have: ``grad_dtype`` (from torch 2.10 on;
    None there allows every dtype), or the parameter's.
    """
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def changed_kind(gradient: torch.Tensor, member: Member) -> ValueError:
    """Return the error for a gradient that has not the dtype and shape of the layout."""
    return ValueError(
        f"{member.name}: its gradient is {_kind(gradient.dtype, gradient.shape)} where "
        f"{_kind(member.dtype, member.shape)} was expected: dtypes and shapes may change "
        "between optimizer.step() and the next backward() alone, for whole parameters"
    )


class Watch:
    """Watch the gradients of one step, from ``backward`` to the first ``decompress``.

    ``Tensor._version``, which autograd counts, shows a change in place. Changes through ``.data``
    are not counted, so they are not detected. AMP's ``scaler`` is the one among the callers if
    None.
    """

    def __init__(
        self,
        members: Sequence[Member],
        parameters: Sequence[torch.nn.Parameter],
        optimizer: Callable[[], Any] = lambda: None,
        scaler: Any = None,
    ) -> None:
        self._members, self._parameters = members, parameters
        self._optimizer, self._scaler = optimizer, scaler
        self._was_unscaled = self._is_unscaled()
        # By slot: no object is added for a gradient, which the garbage collector would look at.
        self._gradients: list[torch.Tensor | None] = [None] * len(members)
        self._pointers, self._versions = [0] * len(members), [0] * len(members)

    def look(self, slot: int, gradient: torch.Tensor) -> bool:
        """Remember a gradient that the optimizer has handed over.

        Returns:
            Whether it is zeros because no backward pass has reached the parameter since the last
            step: the parameter is frozen or was not used.
        """
        member, parameter = self._members[slot], self._parameters[slot]
        if gradient.dtype != member.dtype or gradient.shape != member.shape:
            raise changed_kind(gradient, member)
        # Not a dense copy of a sparse gradient, or a tensor without a version.
        if parameter.grad is gradient and not gradient.is_inference():
            self._gradients[slot] = gradient
            self._pointers[slot], self._versions[slot] = gradient.data_ptr(), gradient._version
        optimizer = self._optimizer()
        if optimizer is None:
            return False
        passes = optimizer._allreduce_delay.get(parameter)  # that are missing
        return passes == optimizer.backward_passes_per_step and not bool(gradient.any())

    def _is_unscaled(self) -> bool:
        """Return whether a GradScaler has unscaled the gradients, which no version shows."""
        scaler, frame = self._scaler, cast(FrameType | None, sys._getframe(1))
        for _ in range(FRAMES if scaler is None else 0):
            if frame is None:
                break
            if frame.f_code.co_filename.endswith("grad_scaler.py"):
                scaler = frame.f_locals.get("self")
                break
            frame = frame.f_back
        state = getattr(scaler, "_per_optimizer_states", {}).get(id(self._optimizer()), {})
        return getattr(state.get("stage"), "name", "") == "UNSCALED"

    def changed(self) -> list[str]:
        """Return the names of parameters whose gradients have changed; raise ValueError if one has
        another dtype or shape, so that it cannot be sent.
        """
        names, too_late = [], self._is_unscaled() and not self._was_unscaled
        seen = self._parameters, self._gradients, self._pointers, self._versions
        there = zip(self._members, *seen, strict=True)
        latest: dict[int, int] | None = None
        for member, parameter, gradient, pointer, version in there:
            if gradient is None:
                continue
            if gradient.dtype != member.dtype or gradient.shape != member.shape:
                raise changed_kind(gradient, member)
            moved = parameter.grad is not gradient or gradient.data_ptr() != pointer
            if not (moved or too_late):
                if gradient._version == version:
                    continue
                latest = latest or self._latest_versions()
                if gradient._version <= latest[_storage(gradient)]:
                    continue
            names.append(member.name)
        return names

    def _latest_versions(self) -> dict[int, int]:
        """Return the version of each storage when its last gradient was handed over.

        Views of one tensor share a version, and autograd may still have added to another view.
        """
        latest: dict[int, int] = {}
        for gradient, version in zip(self._gradients, self._versions, strict=True):
            if gradient is not None:
                storage = _storage(gradient)
                latest[storage] = max(latest.get(storage, 0), version)
        return latest


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _kind(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"


class ServedParameters:
    """The parameters that a compressor serves, by slot of the layout; none if it has no owner.

    Attributes:
        optimizer: Function that returns Horovod's optimizer as long as it exists, or None.
    """

    def __init__(
        self,
        compressor: GradientCompressor,
        owner: Owner | None,
        by_slot: Sequence[torch.nn.Parameter],
    ) -> None:
        self._compressor, self.by_slot = compressor, by_slot
        self._has_owner = owner is not None
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

    def are_current(self, layout: Layout | None) -> bool:
        """Return whether the optimizer, and dtypes and shapes of its parameters, are still the
        same; raise RuntimeError if a second optimizer calls.
        """
        if self._has_owner and not self.is_called_by_its_optimizer():
            return False
        for parameter, member in zip(self.by_slot, layout.members if layout else (), strict=True):
            if gradient_dtype(parameter) != member.dtype or parameter.shape != member.shape:
                return False
        return True

    def begin_step(self, members: Sequence[Member]) -> Watch | None:
        """Begin a step, whose first gradient has been found; return a watch of its gradients, or
        None if no optimizer calls.
        """
        self._seen = self._seen[-1:]
        if self.optimizer() is None:
            return None
        scaler = self._compressor.settings.grad_scaler
        return Watch(members, self.by_slot, self.optimizer, scaler)

    def end_step(self) -> list[str]:
        """Note the order of gradients, and which ones are sparse; return the names of parameters
        that have gradients, but no hook of Horovod's.
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
        """Return ``tensor`` without the negative bit. A copy replaces a gradient that has it,
        because ``set_`` would keep it.
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
        """Return False if another optimizer calls because this one is gone, or never existed; raise
        RuntimeError if this one still exists.
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
