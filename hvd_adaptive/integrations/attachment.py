"""Attach a compressor to the DDP models that a trainer wraps, one after the other."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hvd_adaptive.compressor import GradientCompressor, check_compressor
from hvd_adaptive.ddp import CompressionState, compression_hook

logger = logging.getLogger("hvd_adaptive")


class Attachment:
    """A compressor, and the DDP model that it serves at present.

    Args:
        compressor: The compressor.

    Attributes:
        scaler: The trainer's GradScaler, or None.
    """

    def __init__(self, compressor: GradientCompressor) -> None:
        self.compressor = check_compressor("compressor", compressor)
        self.scaler: Any = None
        self._first = compressor.state_dict()
        self._state: CompressionState | None = None
        self._model: Callable[[], nn.Module | None] = lambda: None
        self._module: Callable[[], nn.Module | None] = lambda: None
        self._loaded_step: int | None = None

    def attach(self, model: nn.Module) -> None:
        """Register the hook with a DDP model, which torch.compile may have wrapped.

        A model that has it keeps it. A new DDP model of the same module continues with the
        compressor's state. Another module starts with the state that the compressor had at first,
        unless a state was loaded since the last step. Residuals follow ``scaler``. All ranks call
        this at the same place.
        """
        model = _uncompiled(model)
        if isinstance(model, DistributedDataParallel) and model is not self._model():
            self._register(model)
        if self._state is not None:
            self._state.follow_scale(self.scaler)

    def _register(self, model: DistributedDataParallel) -> None:
        module = _uncompiled(model.module)
        if self._state is None or module is not self._module():
            self._state = self._begin(model)
        else:
            self._state.abandon()
        model.register_comm_hook(self._state, compression_hook)
        self._model, self._module = weakref.ref(model), weakref.ref(module)
        self._loaded_step = None

    def _begin(self, model: DistributedDataParallel) -> CompressionState:
        """Return a new state for a model, with the compressor's first state if it has served."""
        if self._state is not None:
            self._state.close()
            if self._loaded_step != self.compressor.step:
                self.compressor.load_state_dict(self._first)
        group = model.process_group
        given = None if group is dist.group.WORLD else group
        return CompressionState(self.compressor, model.named_parameters(), given)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.compressor.load_state_dict(state)
        self._loaded_step = self.compressor.step

    def save(self, folder: str | Path) -> None:
        """Write this rank's state into ``folder``; every rank calls this."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        torch.save(self.compressor.state_dict(), _path(folder, rank_here()))

    def load(self, folder: str | Path) -> None:
        """Load this rank's state from ``folder``, or that of rank 0 if there is none.

        Without any, a warning is logged, and the compressor starts with its first state.
        """
        paths = [path for rank in (rank_here(), 0) if (path := _path(folder, rank)).exists()]
        if paths:
            self.load_state_dict(torch.load(paths[0], map_location="cpu", weights_only=True))
        else:
            logger.warning("%s has no state of a compressor, which starts at step 0", folder)
            self.compressor.load_state_dict(self._first)


def _path(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"compressor-{rank}.pt"


def rank_here() -> int:
    """Return this process's rank in the default process group, or 0 if there is none."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _uncompiled(model: nn.Module) -> nn.Module:
    return getattr(model, "_orig_mod", model)
