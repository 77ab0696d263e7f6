"""Level sync: statistics to the first rank, the fitted table to all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from hvd_adaptive.exchange.world import World

logger = logging.getLogger("hvd_adaptive")

Fit = Callable[[Sequence[np.ndarray]], np.ndarray]


class LevelSync:
    """Gathers float64 vectors of equal length, lets the first rank fit, broadcasts the result.

    By collectives of the gradients' library, which Horovod pairs by name: ranks may fit the tables
    of two optimizers in different orders. (An MPI communicator of its own would pair them by order,
    and would have to be freed by all its ranks together.)

    name: begins the names of its collectives.
    """

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name

    def __call__(self, own: np.ndarray, fit: Fit) -> np.ndarray:
        """``fit`` of all ranks' vectors, computed by the first rank; the same bits everywhere."""
        world = self.world
        if world.size == 1:
            return fit([own])
        rows = world.gather_equal(torch.from_numpy(own)[None], f"{self.name}.statistics")
        result = _attempt(fit, rows[:, 0].numpy() if world.rank == 0 else None)
        size = world.broadcast(np.array([result.size]), f"{self.name}.table_size")
        result = result if world.rank == 0 else np.empty(size[0])
        return _checked(world.broadcast(result, f"{self.name}.table"))


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
