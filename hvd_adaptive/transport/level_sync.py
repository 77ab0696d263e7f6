"""Gather statistics, fit tables on the first rank, and broadcast them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from hvd_adaptive.transport.world import World

logger = logging.getLogger("hvd_adaptive")

Fit = Callable[[Sequence[np.ndarray]], np.ndarray]


class LevelSync:
    """Gather float64 vectors of equal length, fit on the first rank, and broadcast the result.

    Args:
        world: The ranks.
        name: Beginning of the names of collectives.
    """

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name

    def __call__(self, own: np.ndarray, fit: Fit) -> np.ndarray:
        """Return ``fit`` of all ranks' vectors, computed by the first rank, on every rank."""
        world = self.world
        if world.size == 1:
            return fit([own])
        rows = world.gather_equal(torch.from_numpy(own)[None], f"{self.name}.statistics")
        result = np.empty(0) if world.rank else _attempt(fit, list(rows[:, 0].numpy()))
        size = world.broadcast(np.array([result.size]), f"{self.name}.table_size")
        result = result if world.rank == 0 else np.empty(size[0])
        return _checked(world.broadcast(result, f"{self.name}.table"))


def _attempt(fit: Fit, vectors: Sequence[np.ndarray]) -> np.ndarray:
    """Return the fit, or a single NaN if it failed, because other ranks wait for a result."""
    try:
        return fit(vectors)
    except Exception:
        logger.exception("the fit of the level table failed")
        return np.array([np.nan])


def _checked(result: np.ndarray) -> np.ndarray:
    if result.size == 1 and np.isnan(result[0]):
        raise RuntimeError("the first rank could not fit the level table; its log says why")
    return result
