"""Level sync: statistics to the first rank, the fitted table to all, over MPI where it is there."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hvd_adaptive.exchange.world import World

logger = logging.getLogger("hvd_adaptive")


# MPI knows so many tags at least.
LEAST_TAGS = 2**15

Fit = Callable[[Sequence[np.ndarray]], np.ndarray]


class LevelSync:
    """Gathers float64 vectors of equal length, lets the first rank fit, broadcasts the result."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self._comm = _communicator(world, f"{name}.mpi")
        logger.debug(
            "level sync over %s", "gradients' collectives" if self._comm is None else "MPI"
        )

    def __call__(self, own: np.ndarray, fit: Fit) -> np.ndarray:
        """``fit`` of all ranks' vectors, computed by the first rank; the same bits everywhere."""
        if self.world.size == 1:
            return fit([own])
        return self._over_world(own, fit) if self._comm is None else self._over_mpi(own, fit)

    def _over_mpi(self, own: np.ndarray, fit: Fit) -> np.ndarray:
        rows = np.empty((self.world.size, own.size)) if self.world.rank == 0 else None
        self._comm.Gather(own, rows, root=0)
        result = _attempt(fit, rows)
        size = np.array([result.size])
        self._comm.Bcast(size, root=0)
        result = result if self.world.rank == 0 else np.empty(size[0])
        self._comm.Bcast(result, root=0)
        return _checked(result)

    def _over_world(self, own: np.ndarray, fit: Fit) -> np.ndarray:
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


def _communicator(world: World, name: str) -> Any:
    """An MPI communicator of the process set's members, in their order, or None where one of them
    cannot use MPI: the others would wait for it for ever.

    Made by ``Create_group``, which only the members call. They tell each other their numbers in
    MPI's world: ``hvd.init(comm=...)`` gives them others.
    """
    if world.size == 1:
        return None
    mpi = _mpi(world)
    own = torch.tensor([-1 if mpi is None else mpi.COMM_WORLD.Get_rank()], device="cpu")
    numbers = world.gather_equal(own, name)[:, 0].tolist()
    if min(numbers) < 0:
        if mpi is not None:
            ranks = zip(world.process_set.ranks, numbers, strict=True)
            without = [rank for rank, number in ranks if number < 0]
            logger.warning("ranks %s cannot use mpi4py: tables travel over Horovod", without)
        return None
    # Several threads may make theirs at once.
    tag = zlib.crc32(name.encode()) % LEAST_TAGS
    return mpi.COMM_WORLD.Create_group(mpi.COMM_WORLD.Get_group().Incl(numbers), tag)


def _mpi(world: World) -> Any:
    """The module ``mpi4py.MPI`` where it shares Horovod's MPI; None otherwise."""
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
    if not MPI.Is_initialized():
        logger.warning("mpi4py does not share Horovod's MPI: tables travel over Horovod")
        return None
    return MPI
