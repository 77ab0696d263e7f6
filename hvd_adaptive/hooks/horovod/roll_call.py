"""Detect from a step's first reduced placeholder whether all ranks take part.

A rank in ``hvd.join()`` adds zeros to every allreduce. Every other collective fails on it or, if
Horovod has the collective in its response cache, breaks the job (MPI_ERR_TRUNCATE, a segmentation
fault). Groups are therefore launched only once all ranks are known to take part, which is still
during the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch

from hvd_adaptive.errors import RankMismatchError
from hvd_adaptive.hooks.horovod.placeholder import Reduction, check_reduced


class RollCall:
    """Poll for the first reduced placeholder of an optimizer; never block."""

    def __init__(self, hvd: Any, optimizer: Any, size: int) -> None:
        self._hvd, self._optimizer, self._size = hvd, optimizer, size
        self._parameter: torch.nn.Parameter | None = None
        self._placeholder: torch.Tensor | None = None
        self._slot = 0
        self._over = False

    def expect(self, parameter: torch.nn.Parameter, placeholder: torch.Tensor, slot: int) -> None:
        """Note a placeholder that Horovod is about to reduce in place; only the first counts."""
        if self._placeholder is None:
            self._parameter, self._placeholder, self._slot = parameter, placeholder, slot

    @property
    def first(self) -> tuple[torch.Tensor, int]:
        """Return the first placeholder and its slot; it is reduced if ``are_back()``."""
        assert self._placeholder is not None
        return self._placeholder, self._slot

    def are_back(self) -> bool:
        """Return whether all placeholders of the optimizer have been reduced.

        Then every rank has submitted all of its own, without further calls of its program.
        """
        optimizer = self._optimizer()
        if optimizer is None or self._placeholder is None:
            return False
        try:
            return all(map(self._is_back, optimizer._requires_update))
        except ValueError:  # the program waits for them now, and has removed some
            return False

    def _is_back(self, parameter: torch.nn.Parameter) -> bool:
        handle = self._handle(parameter)
        # Sparse gradients have a function instead of a handle, and are not compressed.
        return handle is not None and (callable(handle) or self._hvd.poll(handle))

    @property
    def is_over(self) -> bool:
        """Return whether ``answer`` will return nothing any more."""
        return self._over

    def answer(self) -> Reduction | None:
        """Return, once, the reduction if all ranks take part and agree on everything.

        ``decompress`` reports every other result.
        """
        if self._over or self._placeholder is None:
            return None
        handle = self._handle(self._parameter)
        try:
            if handle is None or not self._hvd.poll(handle):
                return None
        except ValueError:  # another thread: the program waits for it now, and has removed it
            self._over = True
            return None
        self._over = True
        try:
            read = check_reduced(self._placeholder, self._size)
        except (RankMismatchError, ValueError):
            return None
        return read if read.active == self._size and read.same_groups else None

    def _handle(self, parameter: Any) -> Any:
        """Return a placeholder's handle, which Horovod keeps by parameter or group of them."""
        optimizer = self._optimizer()
        if optimizer is None:
            return None
        group = optimizer._p_to_group.get(parameter, parameter)
        handle, _ = optimizer._handles.get(group, (None, None))
        return handle
