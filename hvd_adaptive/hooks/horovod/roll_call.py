"""Whether all ranks take part in a step, told by the first placeholder that comes back.

A rank in ``hvd.join()`` adds zeros to every allreduce. Every other collective fails there or, where
Horovod has it in its response cache, breaks the job (MPI_ERR_TRUNCATE, a segmentation fault). So
groups are launched once all ranks are known to be there, during the backward pass still.
"""

from __future__ import annotations

from typing import Any

import torch

from hvd_adaptive.errors import RankMismatchError
from hvd_adaptive.hooks.horovod.placeholder import Reduction, check_reduced


class RollCall:
    """Waits, without ever blocking, for one placeholder of an optimizer's."""

    def __init__(self, hvd: Any, optimizer: Any, size: int) -> None:
        self._hvd, self._optimizer, self._size = hvd, optimizer, size
        self._parameter: torch.nn.Parameter | None = None
        self._placeholder: torch.Tensor | None = None
        self._slot = 0
        self._over = False

    def expect(self, parameter: torch.nn.Parameter, placeholder: torch.Tensor, slot: int) -> None:
        """Horovod is about to reduce this placeholder in place; the first one is waited for."""
        if self._placeholder is None:
            self._parameter, self._placeholder, self._slot = parameter, placeholder, slot

    @property
    def first(self) -> tuple[torch.Tensor, int]:
        """The first placeholder, reduced once all ``are_back``, and its slot."""
        assert self._placeholder is not None
        return self._placeholder, self._slot

    def are_back(self) -> bool:
        """Whether every gradient of the optimizer's has come back reduced: so every rank has
        submitted all of its own, and needs no further call of the program for that."""
        optimizer = self._optimizer()
        if optimizer is None or self._placeholder is None:
            return False
        try:
            return all(map(self._is_back, optimizer._requires_update))
        except ValueError:  # the program waits for them at this moment, and has taken some
            return False

    def _is_back(self, parameter: torch.nn.Parameter) -> bool:
        handle = self._handle(parameter)
        # Sparse gradients have a function in a handle's place, and are nothing of ours.
        return handle is not None and (callable(handle) or self._hvd.poll(handle))

    def answer(self) -> Reduction | None:
        """Given once, where all ranks are there and agree. All else is for ``decompress`` to
        tell."""
        if self._over or self._placeholder is None:
            return None
        handle = self._handle(self._parameter)
        if handle is None or not self._hvd.poll(handle):
            return None
        self._over = True
        try:
            read = check_reduced(self._placeholder, self._size)
        except (RankMismatchError, ValueError):
            return None
        return read if read.active == self._size else None

    def _handle(self, parameter: Any) -> Any:
        """Of a placeholder's allreduce, which Horovod keeps by parameter or by group of them."""
        optimizer = self._optimizer()
        if optimizer is None:
            return None
        group = optimizer._p_to_group.get(parameter, parameter)
        handle, _ = optimizer._handles.get(group, (None, None))
        return handle
