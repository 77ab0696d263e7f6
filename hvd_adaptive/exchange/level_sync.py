"""Level sync: statistics to the first rank, the fitted table to all, over MPI where it is there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hvd_adaptive.exchange.world import World

logger = logging.getLogger("hvd_adaptive")


Fit = Callable[[Sequence[np.ndarray]], np.ndarray]


class LevelSync:
    """Gathers float64 vectors of equal length, lets the first rank fit, broadcasts the result."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self._comm = _communicator(world)
        logger.debug("level sync over %s", "Horovod" if self._comm is None else "MPI")

    def __call__(self, own: np.ndarray, fit: Fit) -> np.ndarray:
        """``fit`` of all ranks' vectors, computed by the first rank; the same bits everywhere."""
        if self.world.size == 1:
            return fit([own])
        return self._over_horovod(own, fit) if self._comm is None else self._over_mpi(own, fit)

    def _over_mpi(self, own: np.ndarray, fit: Fit) -> np.ndarray:
        rows = np.empty((self.world.size, own.size)) if self.world.rank == 0 else None
        self._comm.Gather(own, rows, root=0)
        result = _attempt(fit, rows)
        size = np.array([result.size])
        self._comm.Bcast(size, root=0)
        result = result if self.world.rank == 0 else np.empty(size[0])
        self._comm.Bcast(result, root=0)
        return _checked(result)

    def _over_horovod(self, own: np.ndarray, fit: Fit) -> np.ndarray:
        rows = self.world.gather_equal(torch.from_numpy(own)[None], f"{self.name}.statistics")
        result = _attempt(fit, rows[:, 0].numpy() if self.world.rank == 0 else None)
        size = self.world.broadcast(np.array([result.size]), f"{self.name}.table_size")
        result = result if self.world.rank == 0 else np.empty(size[0])
        return _checked(self.world.broadcast(result, f"{self.name}.table"))


def _attempt(fit: Fit, rows: np.ndarray | None) -> np.ndarray:
    """The first rank's fit; a single NaN where it failed, so that no rank waits for ever."""
    if rows is None:
        return np.empty(0)
    try:
        return fit(list(rows))
    except Exception:
        logger.exception("the fit of the level table failed")
        return np.array([np.nan])


def _checked(result: np.ndarray) -> np.ndarray:
    if result.size == 1 and np.isnan(result[0]):
        raise RuntimeError("the first rank could not fit the level table; its log says why")
    return result


def _communicator(world: World) -> Any:
    """An MPI communicator of the process set's members, or None where Horovod does not use MPI.

    Made by ``Create_group``, which only the members call.
    """
    hvd = world.hvd
    if not (hvd.mpi_built() and hvd.mpi_enabled() and hvd.mpi_threads_supported()):
        return None
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except ImportError as error:
        logger.warning("mpi4py cannot be imported (%s): tables travel over Horovod", error)
        return None
    if not MPI.Is_initialized() or MPI.COMM_WORLD.Get_size() != hvd.size():
        logger.warning("mpi4py does not share Horovod's MPI world: tables travel over Horovod")
        return None
    group = MPI.COMM_WORLD.Get_group().Incl(world.process_set.ranks)
    return MPI.COMM_WORLD.Create_group(group)
