"""Define Training, what a compressor keeps from step to step besides settings and level tables."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

import torch

from hvd_adaptive import states
from hvd_adaptive.adapt.updates import Updates
from hvd_adaptive.base.checks import check_choice, check_integer
from hvd_adaptive.coding.payload import DTYPE_CODES
from hvd_adaptive.connection import Connection
from hvd_adaptive.feedback import Residuals, check_residuals
from hvd_adaptive.instances import Instance
from hvd_adaptive.kernels.random import Use, key_of
from hvd_adaptive.monitor import StepMeter
from hvd_adaptive.parts import Parts

logger = logging.getLogger("hvd_adaptive")

TensorKind = tuple[str, tuple[int, ...]]  # dtype and shape
DTYPES = [str(dtype).removeprefix("torch.") for dtype in DTYPE_CODES]


class Training:
    """State of one compressor for the package's other modules; users read ``report()``.

    Attributes:
        updates: When tables are refitted.
        meter: Measures what is sent, for ``report``.
        instance: Number of the compressor in its random streams.
        encodes: Calls of ``encode`` without a seed.
        loads: States that were loaded.
        tensors: Dtype and shape of the tensors of ``average`` by position, as any rank last had
            one; None if no rank ever had.
        connection: Connection to the optimizer or model that the compressor serves, or None.
    """

    def __init__(self, parts: Parts) -> None:
        codec = parts.default
        weight = codec.settings.error_feedback
        self._scaler = codec.settings.grad_scaler
        self.updates = Updates(parts)
        self.meter = StepMeter()
        self.residuals = None if weight is None else Residuals(weight, self._scaler)
        self.instance = Instance()
        self.encodes = self.loads = 0
        self.tensors: list[TensorKind | None] = []
        self.connection: Connection | None = None

    def wait(self) -> None:
        """Wait until no average is in progress in another thread; see ``Connection.wait``."""
        if self.connection is not None:
            self.connection.wait()

    def next_key(self, seed: int, rank: int) -> int:
        """Return the key of the next call of ``encode`` by a compressor of this seed."""
        key = key_of(self.instance.bind(), seed, rank, self.encodes, Use.ENCODE)
        self.encodes += 1
        return key

    def follow_scale(self, scaler: Any) -> None:
        """Let residuals follow the loss scale of a GradScaler; see ``Residuals``."""
        self._scaler = scaler
        if self.residuals is not None:
            self.residuals.scaler = scaler

    def serve_as(self, old: Training) -> None:
        """Serve what ``old`` served, with its random numbers and its GradScaler."""
        self.instance, self.connection, self.loads = old.instance, old.connection, old.loads
        self.follow_scale(old._scaler)

    def load_from(self, old: Training, keep: bool, step: int) -> None:
        """Continue ``old``, whose compressor had other settings; see ``Updates.load_from``."""
        self.meter, self.encodes, self.tensors = old.meter, old.encodes, old.tensors
        if self.residuals is not None and old.residuals is not None:
            self.residuals = self.residuals.loaded(old.residuals.state_dict())
        self.updates.load_from(old.updates, keep, step)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as plain tensors and numbers."""
        residuals = {} if self.residuals is None else self.residuals.state_dict()
        own: dict[str, Any] = {"encodes": self.encodes} | self.instance.state_dict()
        if self.tensors:
            own["tensors"] = [kind and [kind[0], list(kind[1])] for kind in self.tensors]
        return own | residuals | self.updates.state_dict()

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError unless ``load_state`` can load ``state``."""
        states.whole(state, "encodes")
        _tensors_of(state)
        self.updates.check_state(state)
        check_residuals(state)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load what ``check_state`` accepted, except the instance, after the codecs' tables."""
        self.encodes, self.tensors = states.whole(state, "encodes"), _tensors_of(state)
        self.updates.load_state(state)
        if self.residuals is not None:
            self.residuals = self.residuals.loaded(state)
        elif "residuals" in state:
            logger.warning("error_feedback=None: the residuals of the loaded state are dropped")

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which serves no optimizer."""
        return self.__dict__ | {"connection": None}


def _tensors_of(state: Mapping[str, Any]) -> list[TensorKind | None]:
    """Return the entry ``tensors``, [] if there is none; raise ValueError if it is invalid."""
    of, saved = "state: tensors", state.get("tensors", [])
    try:
        kinds = [kind if kind is None else (str(kind[0]), list(kind[1])) for kind in saved]
    except (TypeError, LookupError):
        raise ValueError(f"{of}: must be a list of [dtype, shape] or None, not {saved!r}") from None
    for dtype in (kind[0] for kind in kinds if kind is not None):
        check_choice(f"{of}: dtype", dtype, DTYPES)
    return [
        kind and (kind[0], tuple(check_integer(f"{of}: shape", n, 0) for n in kind[1]))
        for kind in kinds
    ]


def running_horovod() -> Any:
    """Return the module ``horovod.torch`` if it is imported and initialised, or None."""
    hvd = sys.modules.get("horovod.torch")
    return hvd if hvd is not None and hvd.is_initialized() else None


def rank_and_size() -> tuple[int, int]:
    """Return the rank and the number of ranks of Horovod or torch.distributed; (0, 0) without."""
    if (hvd := running_horovod()) is not None:
        return hvd.rank(), hvd.size()
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 0


def is_first_rank(group: Any = None) -> bool:
    """Return whether this process is the first rank of ``group``, or of all ranks: those that
    torchrun has started, before torch.distributed is running.
    """
    if group is not None:
        return torch.distributed.get_rank(group) == 0
    rank, size = rank_and_size()
    return rank == 0 if size else os.environ.get("RANK", "0") == "0"
