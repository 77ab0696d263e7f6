"""Cut a group into one chunk for each owner."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Chunk:
    """Quantised coordinates ``begin`` to ``end`` of a group, and its full-precision coordinates
    ``full_begin`` to ``full_end``."""

    begin: int
    end: int
    full_begin: int
    full_end: int

    @functools.cached_property
    def quantized(self) -> int:
        return self.end - self.begin

    @functools.cached_property
    def full(self) -> int:
        return self.full_end - self.full_begin

    @functools.cached_property
    def coordinates(self) -> int:
        return self.quantized + self.full

    def take(self, flat: torch.Tensor, chunk: torch.Tensor) -> None:
        """Copy the chunk of a group's tensor to ``chunk``, 1-D."""
        chunk[: self.quantized] = flat[self.begin : self.end]
        chunk[self.quantized :] = flat[self.full_begin : self.full_end]

    def frame(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the chunk of a group's tensor; its quantised section is undefined if both exist.

        The caller encodes quantised values from elsewhere. The result is a view if one of the
        sections is empty.
        """
        if not self.full:
            return flat[self.begin : self.end]
        if not self.quantized:
            return flat[self.full_begin : self.full_end]
        frame = flat.new_empty(self.coordinates)
        frame[self.quantized :] = flat[self.full_begin : self.full_end]
        return frame

    def put(self, chunk: torch.Tensor, flat: torch.Tensor) -> None:
        """Invert ``take``: copy ``chunk`` to the group's tensor."""
        flat[self.begin : self.end] = chunk[: self.quantized]
        flat[self.full_begin : self.full_end] = chunk[self.quantized :]


@functools.lru_cache(maxsize=1024)
def cut(quantized: int, full: int, bucket_size: int, owners: int) -> tuple[Chunk, ...]:
    """Return a chunk for each owner, as equal as whole buckets allow, in the group's order."""
    buckets = -(-quantized // bucket_size)
    edges = [min(quantized, buckets * o // owners * bucket_size) for o in range(owners + 1)]
    full_edges = [quantized + full * o // owners for o in range(owners + 1)]
    return tuple(
        Chunk(edges[o], edges[o + 1], full_edges[o], full_edges[o + 1]) for o in range(owners)
    )
