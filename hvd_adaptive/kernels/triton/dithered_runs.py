"""Find the runs of dithered symbols (kernels/dithered.py) in Triton, for writers and readers.

Symbols of each class are counted in tiles; sums of these counts give the places of a tile's
symbols.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from hvd_adaptive.kernels.triton.ecdq import dither
from hvd_adaptive.kernels.triton.launch import kernel, launch, signed
from hvd_adaptive.kernels.triton.layout import magic
from hvd_adaptive.kernels.triton.places import buckets_on, place_of
from hvd_adaptive.kernels.triton.prefix_streams import Tables, tables

_TILE = 1024
# The flag of a body with an invalid step.
IMPOSSIBLE_STEPS = 1


@dataclass(frozen=True)
class Shape:
    """Hold the arguments that the kernels of a body are started with."""

    n: int
    bucket_size: int
    segment: int
    classes: int

    @property
    def tile(self) -> int:
        return min(_TILE, self.segment)

    @property
    def segments(self) -> int:
        return -(-self.n // self.segment)

    @property
    def tiles(self) -> int:
        """Return the tiles of whole segments."""
        return self.segments * (self.segment // self.tile)

    @property
    def words(self) -> int:
        """Return the 32-bit words before the list of segments' ends, or the integers."""
        return 1 + -(-self.n // self.bucket_size)

    def launch(
        self, action: Any, programs: int, on: torch.Tensor, key: int, *args: Any, **constants: Any
    ) -> None:
        launch(
            action,
            programs,
            on,
            self.n,
            self.bucket_size,
            magic(self.bucket_size),
            signed(key),
            *args,
            TILE=self.tile,
            BUCKETS=buckets_on(self.bucket_size, self.tile),
            SEGMENT=self.segment,
            CLASSES=self.classes,
            **constants,
        )


@dataclass(frozen=True)
class Runs:
    """Locate the symbols of the classes, segment by segment.

    bases: int32 (segments, 4, tiles of a segment), the places at which each tile's symbols begin in
    their segment. begins, counts: int64 and int32 (segments * classes,), of the runs.
    """

    bases: torch.Tensor
    begins: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def of(cls, counts: torch.Tensor, shape: Shape) -> Runs:
        """Return the runs of ``counts``, int32 (segments, 4, tiles of a segment)."""
        flat = counts.view(len(counts), -1)
        bases = (flat.cumsum(1) - flat).to(torch.int32).view_as(counts)
        starts = torch.arange(len(counts), device=counts.device)[:, None] * shape.segment
        begins = (starts + bases[:, : shape.classes, 0]).reshape(-1)
        sizes = counts[:, : shape.classes].sum(2, dtype=torch.int32).reshape(-1)
        return cls(bases, begins, sizes)


def books_of(code: Any, device: torch.device) -> Tables:
    dtype = torch.uint8 if code.dtype().itemsize == 1 else torch.int16
    return tables(tuple(code.books), dtype, device)


def counts_of(
    steps: torch.Tensor, key: int, shape: Shape, flag: torch.Tensor | None = None
) -> torch.Tensor:
    """Count the symbols of each class in each tile: int32 (segments, 4, tiles of a segment).

    flag: int32, set to IMPOSSIBLE_STEPS if a step is invalid.
    """
    counts = torch.empty(
        shape.segments, 4, shape.segment // shape.tile, dtype=torch.int32, device=steps.device
    )
    checked = flag is not None
    shape.launch(
        _counts_kernel,
        shape.tiles,
        steps,
        key,
        steps,
        counts,
        flag if checked else counts,
        CHECK=checked,
        WRONG=IMPOSSIBLE_STEPS,
    )
    return counts


@triton.jit
def group_of(m, CLASSES: tl.constexpr):
    """Return the class of a dither: its top bits."""
    return (m.to(tl.int64) * CLASSES) >> 23


@triton.jit
def ranks_of(usable, group):
    """Return how many symbols of the same class come before each symbol of a tile (int64), and how
    many there are of each class, 16 bits for each (int64).
    """
    one = tl.where(usable, tl.full(group.shape, 1, tl.int64) << (16 * group), 0)
    return ((tl.cumsum(one, 0) >> (16 * group)) & 0xFFFF) - 1, tl.sum(one, 0)


@kernel
def _counts_kernel(
    n: tl.int64,
    bucket_size: tl.int64,
    magic: tl.int64,
    stream: tl.int64,
    steps,
    counts,
    flag,
    TILE: tl.constexpr,
    BUCKETS: tl.constexpr,
    SEGMENT: tl.constexpr,
    CLASSES: tl.constexpr,
    CHECK: tl.constexpr,
    WRONG: tl.constexpr,
):
    """Count a tile in each program."""
    tile = tl.program_id(0).to(tl.int64)
    _i, there, bucket, place = place_of(tile, n, bucket_size, magic, TILE, BUCKETS)
    _negative, m = dither(stream, bucket, place)
    step = tl.load(steps + bucket, mask=there, other=0.0)
    _, total = ranks_of(step > 0, group_of(m, CLASSES))
    own = tl.arange(0, 4)
    TILES: tl.constexpr = SEGMENT // TILE
    at = (tile // TILES * 4 + own) * TILES + tile % TILES
    tl.store(counts + at, ((total >> (16 * own)) & 0xFFFF).to(tl.int32))
    if CHECK:
        possible = (step != step) | ((step >= 0) & (step < float("inf")))
        bad = tl.max((possible == 0).to(tl.int32), 0)
        tl.atomic_max(flag, bad * WRONG, mask=bad > 0, sem="relaxed")
