"""Define World: the ranks that exchange gradients, their collectives, and the sync of tables."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

# Ranks up to which an allgather over MPI is made of direct messages. Measured at 1 Gbit/s with
# benchmarks/network.py: faster at 4 and 6 ranks, not clearly so at 8.
MOST_DIRECT = 6


class World(ABC):
    """All ranks, seen from one of them.

    Collectives have names. Every rank submits each collective once under its name; ``allgather``
    and ``alltoall`` return a handle without waiting.

    Attributes:
        sends_directly: Whether an allgather consists of messages to each rank (``AllGather``).
    """

    size: int
    rank: int
    sends_directly: bool = False

    @abstractmethod
    def is_current(self) -> bool:
        """Return whether the ranks are still the same."""

    @abstractmethod
    def allgather(self, data: torch.Tensor, name: str) -> Any:
        """Submit ``data`` (uint8, 1-D, any length) to every rank; ``synchronize`` returns all
        ranks' bytes, concatenated.
        """

    @abstractmethod
    def alltoall(self, data: torch.Tensor, splits: torch.Tensor, name: str) -> Any:
        """Submit part r of ``data`` (uint8, 1-D) to rank r; ``splits`` (int32) contains lengths.
        ``synchronize`` returns the received bytes and their lengths by rank.
        """

    def alltoall_equal(self, data: torch.Tensor) -> torch.Tensor:
        """Send part r of ``data`` (uint8, 1-D) to rank r, and return what is received; all parts
        are of one length. The host waits only if ``data`` is on the CPU.
        """
        raise NotImplementedError

    @abstractmethod
    def poll(self, handle: Any) -> bool:
        """Return whether a collective has ended, without waiting."""

    @abstractmethod
    def synchronize(self, handle: Any) -> Any:
        """Wait for a collective and return its result, or a list of what each rank sent."""

    @abstractmethod
    def gather_equal(self, values: torch.Tensor, name: str) -> torch.Tensor:
        """Wait, and return all ranks' tensors of equal shape, stacked."""

    @abstractmethod
    def broadcast(self, values: np.ndarray, name: str) -> np.ndarray:
        """Wait, and return the first rank's array, byte for byte."""

    @property
    def knows_lengths(self) -> bool:
        """Return whether ``allgather`` and ``alltoall`` exchange no lengths, and so do not wait."""
        return True

    @property
    def generation(self) -> Any:
        """Return an object that differs if ranks have been started anew."""
        return self

    def average_all(self, tensors: Sequence[torch.Tensor], name: str) -> None:
        """Average tensors over ranks in place, as training without compression does, and wait."""
        raise NotImplementedError

    @abstractmethod
    def node(self) -> tuple[int, int]:
        """Return this rank's node and the number of ranks on it; may be a collective."""


def nodes_of(ranks_per_node: int | None, ranks: int) -> tuple[int, ...]:
    """Return the node of each rank if consecutive ranks share one; () for None. ValueError is
    raised if ``ranks_per_node`` does not divide ``ranks``.
    """
    if ranks_per_node is None:
        return ()
    if ranks % ranks_per_node:
        raise ValueError(f"ranks_per_node={ranks_per_node}: must divide the {ranks} ranks")
    return tuple(rank // ranks_per_node for rank in range(ranks))


def find_nodes(world: World, name: str) -> tuple[int, ...]:
    """Return each rank's node, or () if nodes run different numbers of ranks; a collective."""
    # cross_rank numbers nodes only if all run equally many ranks.
    own = torch.tensor(world.node(), device="cpu")
    everyone = world.gather_equal(own, f"{name}.nodes").tolist()
    nodes = tuple(node for node, _ in everyone)
    if len({nodes.count(node) for node in nodes}) > 1 or len({size for _, size in everyone}) > 1:
        return ()
    return nodes


logger = logging.getLogger("hvd_adaptive")

Fit = Callable[[Sequence[np.ndarray]], np.ndarray]


class LevelSync:
    """Gather float64 vectors of equal length, fit on the first rank, and broadcast the result."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name

    def __call__(self, own: np.ndarray, fit: Fit) -> np.ndarray:
        """Return ``fit`` of all ranks' vectors, computed by the first rank, on every rank."""
        world = self.world
        if world.size == 1:
            return fit([own])
        rows = world.gather_equal(torch.from_numpy(own)[None], f"{self.name}.statistics")
        result = np.empty(0)
        if world.rank == 0:
            try:
                result = fit(list(rows[:, 0].numpy()))
            except Exception:
                logger.exception("the fit of the level table failed")
                result = np.array([np.nan])  # the other ranks wait for a result
        size = world.broadcast(np.array([result.size]), f"{self.name}.table_size")
        if world.rank:
            result = np.empty(size[0])
        result = world.broadcast(result, f"{self.name}.table")
        if result.size == 1 and np.isnan(result[0]):
            raise RuntimeError("the first rank could not fit the level table; its log says why")
        return result
