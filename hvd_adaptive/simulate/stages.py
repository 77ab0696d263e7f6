"""Run the exchange of a group stage by stage, all ranks in one process."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

import torch

from hvd_adaptive.transport.collectives import Collective


class RankGradients:
    """Gradients of one rank, rows of ``flats``, copies of the ``averages`` that were delivered, and
    memory that every group reuses (``run.trip.Gradients``).

    In training, another group may be encoded or decoded in this memory while a collective is in
    progress. Therefore ``take_back`` overwrites it each time: a late read yields NaN.
    """

    def __init__(self, flats: Sequence[torch.Tensor], rank: int) -> None:
        self._flats, self._rank = flats, rank
        self._buffers: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}
        self.averages: dict[int, torch.Tensor] = {}

    def gather(self, index: int, changed: bool) -> torch.Tensor:
        """Return a copy of a group."""
        own = self._flats[index][self._rank]
        return self.buffer("gradients", own.numel(), own.dtype, own.device).copy_(own)

    def buffer(
        self, use: str, coordinates: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """See ``Memory.buffer``."""
        key = use, dtype, device
        if key not in self._buffers or self._buffers[key].numel() < coordinates:
            self._buffers[key] = torch.empty(coordinates, dtype=dtype, device=device)
        return self._buffers[key][:coordinates]

    def result(
        self, index: int, coordinates: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """See ``Memory.result``."""
        return self.buffer("result", coordinates, dtype, device)

    def deliver(self, index: int, average: torch.Tensor) -> None:
        """Copy the average of a group."""
        self.averages[index] = average.clone()

    def take_back(self) -> None:
        """Overwrite all memory with NaN."""
        for buffer in self._buffers.values():
            buffer.fill_(float("nan"))


_Result = TypeVar("_Result")


def together(
    ways: Sequence[Generator[Collective, list[torch.Tensor], _Result]],
    under_way: Callable[[], None] = lambda: None,
) -> _Result:
    """Run an exchange of all ranks, a generator of each, stage by stage; return the first rank's
    result. The other ranks, whose results are the same, do not decode their last collective.

    ``under_way`` is called when all ranks have submitted a collective and none has read a result.
    """
    requests = [next(way) for way in ways]
    while True:
        under_way()
        received = type(requests[0]).hand_over(requests)
        try:
            first = ways[0].send(received[0])
        except StopIteration as end:
            return end.value
        others = zip(ways[1:], received[1:], strict=True)
        requests = [first, *(way.send(own) for way, own in others)]
