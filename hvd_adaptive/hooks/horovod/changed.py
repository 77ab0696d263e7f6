"""Detect changes of parameters between steps, and of gradients within a step.

After ``model.double()`` between two steps groups are laid out anew. A change of a gradient between
``backward`` and ``optimizer.step`` is too late: the gradient may have been sent.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch

from hvd_adaptive.base.errors import WarnOnce
from hvd_adaptive.layout import Layout, Member

logger = logging.getLogger("hvd_adaptive")

# Frames from ``decompress`` up to ``GradScaler.step``, with room for wrappers of ``step``.
FRAMES = 24


def is_unscaled(optimizer: Any, scaler: Any = None) -> bool:
    """Return whether AMP's GradScaler has unscaled the optimizer's gradients since its last update.

    ``Tensor._version`` does not show that.

    scaler: the GradScaler; by default the one among the callers.
    """
    if scaler is None:
        scaler = _calling_scaler()
    state = getattr(scaler, "_per_optimizer_states", {}).get(id(optimizer), {})
    return getattr(state.get("stage"), "name", "") == "UNSCALED"


def _calling_scaler() -> Any:
    frame: FrameType | None = sys._getframe(2)
    for _ in range(FRAMES):
        if frame is None:
            return None
        if frame.f_code.co_filename.endswith("grad_scaler.py"):
            return frame.f_locals.get("self")
        frame = frame.f_back
    return None


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
        unscaled: Function that returns whether AMP has unscaled the gradients by now.
    """

    def __init__(
        self,
        members: Sequence[Member],
        parameters: Sequence[torch.nn.Parameter],
        unscaled: Callable[[], bool] = lambda: False,
    ) -> None:
        self._members, self._parameters, self._unscaled = members, parameters, unscaled
        self._was_unscaled = unscaled()
        # By slot: no object is added for a gradient, which the garbage collector would look at.
        self._gradients: list[torch.Tensor | None] = [None] * len(members)
        self._pointers, self._versions = [0] * len(members), [0] * len(members)

    def look(self, slot: int, gradient: torch.Tensor) -> None:
        """Remember a gradient that the optimizer has handed over.

        Raises:
            ValueError: It has another dtype or shape than the layout's.
        """
        member = self._members[slot]
        if gradient.dtype != member.dtype or gradient.shape != member.shape:
            raise changed_kind(gradient, member)
        if self._parameters[slot].grad is not gradient or gradient.is_inference():
            return  # a dense copy of a sparse gradient, or a tensor without a version
        self._gradients[slot] = gradient
        self._pointers[slot], self._versions[slot] = gradient.data_ptr(), gradient._version

    def changed(self) -> list[str]:
        """Return the names of parameters whose gradients have changed.

        Raises:
            ValueError: A gradient has another dtype or shape, so it cannot be sent.
        """
        names, too_late = [], self._unscaled() and not self._was_unscaled
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


class WarnOfChanges:
    """Warn, once, that gradients were changed too late."""

    def __init__(self) -> None:
        self._warn = WarnOnce(logger)

    def __call__(self, watch: Watch) -> None:
        names = watch.changed()
        if names:
            self._warn(
                "%s%s: the gradient was changed between backward() and optimizer.step(): the "
                "change is lost, or counts for this rank's share of the average only. Call "
                "optimizer.synchronize() before gradients are clipped, unscaled or changed in "
                "another way, then step in `with optimizer.skip_synchronize():`",
                names[0],
                f" and {len(names) - 1} more" if names[1:] else "",
            )


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _kind(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"
