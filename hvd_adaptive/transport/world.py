"""World: the ranks that exchange gradients, and their collectives, whatever carries them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch

# Ranks up to which an allgather over MPI is made of direct messages. Measured at 1 Gbit/s with
# benchmarks/network.py: faster at 4 and 6 ranks, not clearly so at 8.
MOST_DIRECT = 6


class World(ABC):
    """One rank's view of all ranks.

    Collectives have names. Every rank submits each of them once under its name; ``allgather`` and
    ``alltoall`` return a handle at once.

    size, rank: the number of ranks and this rank's number among them.
    sends_directly: an allgather is made of messages to each rank (``AllGather``).
    orders_collectives: ranks may submit collectives in different orders.
    """

    size: int
    rank: int
    sends_directly: bool = False
    orders_collectives: bool = False

    @abstractmethod
    def is_current(self) -> bool:
        """Return whether the ranks are still the same."""

    @abstractmethod
    def allgather(self, data: torch.Tensor, name: str) -> Any:
        """Submit ``data`` (uint8, 1-D, any length) to every rank; ``synchronize`` returns all
        ranks' bytes end to end."""

    @abstractmethod
    def alltoall(self, data: torch.Tensor, splits: torch.Tensor, name: str) -> Any:
        """Submit part r of ``data`` (uint8, 1-D) to rank r. ``splits`` (int32) holds the parts'
        lengths; ``synchronize`` returns the bytes received and their lengths by rank."""

    @abstractmethod
    def poll(self, handle: Any) -> bool:
        """Return whether a collective has ended; never waits."""

    def wait_until_there(self, handle: Any, name: str, operation: str) -> None:  # noqa: B027
        """Wait for a collective that must be given up if its step is, before ``synchronize``; by
        default no step is given up while it waits."""

    @abstractmethod
    def synchronize(self, handle: Any) -> Any:
        """Wait for a collective and return its result."""

    @abstractmethod
    def gather_equal(self, values: torch.Tensor, name: str) -> torch.Tensor:
        """Return all ranks' tensors of equal shape, stacked; waits."""

    @abstractmethod
    def broadcast(self, values: np.ndarray, name: str) -> np.ndarray:
        """Return the first rank's array, byte for byte; waits."""

    @abstractmethod
    def node(self) -> tuple[int, int]:
        """Return the number of this rank's node, and how many of the ranks run on it; perhaps a
        collective."""
