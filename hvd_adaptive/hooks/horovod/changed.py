"""Detect changes of parameters between steps, and of gradients within a step.

After ``model.double()`` between two steps groups are laid out anew. A change of a gradient between
``backward`` and ``optimizer.step`` is too late: the gradient may have been sent.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, cast

import torch

from hvd_adaptive.layout import Layout, Member

CHANGED_TOO_LATE = (
    "%s%s: the gradient was changed between backward() and optimizer.step(): the change is lost, "
    "or counts for this rank's share of the average only. Call optimizer.synchronize() before "
    "gradients are clipped, unscaled or changed in another way, then step in "
    "`with optimizer.skip_synchronize():`"
)

# Frames from ``decompress`` up to ``GradScaler.step``, with room for wrappers of ``step``.
FRAMES = 24


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype that a parameter's gradient will have.

    It is the parameter's, unless the user has set ``grad_dtype`` (from torch 2.10 on; None there
    allows every dtype).
    """
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def is_laid_out(layout: Layout, parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether parameters, in the layout's order, still have its dtypes and shapes."""
    for parameter, member in zip(parameters, layout.members, strict=True):
        if gradient_dtype(parameter) != member.dtype or parameter.shape != member.shape:
            return False
    return True


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
    are not counted, so they are not detected.

    Args:
        members: The members of the layout.
        parameters: Their parameters.
        optimizer: Function that returns Horovod's optimizer, or None if it does not exist any more.
        scaler: AMP's GradScaler; by default the one among the callers.
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

        Raises:
            ValueError: It has another dtype or shape than the layout's.
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
        """Return whether AMP's GradScaler has unscaled the optimizer's gradients since its last
        update. ``Tensor._version`` does not show that."""
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
        """Return the names of parameters whose gradients have changed.

        Raises:
            ValueError: A gradient has another dtype or shape, so it cannot be sent.
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
