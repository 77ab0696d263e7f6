"""Define what the kernels of dithered payloads share: the body's layout, and the buckets' steps.

The body is little-endian: u32 ``kind``; float32 steps, one for each bucket; then, if kind is CODED,
two u32 for each segment of SEGMENT coordinates, the ends of its codes and of its escaped integers,
counted from the first byte behind these numbers; then the segments. A segment's codes are the
symbols of the first class in that class's book, then those of the second, and so on, without a gap;
zero bits fill the last byte. Coordinates of buckets without a step above 0 have no symbol.

If the codes would be longer, kind is the bytes of an integer, and all integers follow, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from hvd_adaptive.base.errors import PayloadError
from hvd_adaptive.kernels.prefix_tables import PrefixTables

# Runs of symbols stay in the second-level cache; 64 bits for each segment do not count.
SEGMENT = 1 << 16
CODED = 0
WIDTHS: dict[int, np.dtype[Any]] = {2: np.dtype("<i2"), 4: np.dtype("<i4")}
HALF = 2**23  # integers of one sign of the dither


class Code(Protocol):
    """Describe a step and code books: see codec/dithered_code.py."""

    @property
    def delta(self) -> float: ...

    @property
    def most(self) -> int: ...

    @property
    def dtype(self) -> type: ...

    @property
    def books(self) -> Sequence[PrefixTables]: ...


class Stretch(NamedTuple):
    """Describe coordinates ``begin`` to ``end`` of a tensor with these steps and this key."""

    steps: torch.Tensor
    bucket_size: int
    key: int
    begin: int
    end: int


def least_bytes(coordinates: int, bucket_size: int, width: int) -> int:
    """Return the fewest bytes of a body."""
    offsets = 8 * -(-coordinates // SEGMENT)
    return head_bytes(coordinates, bucket_size) + min(offsets, width * coordinates)


def most_bytes(coordinates: int, bucket_size: int, width: int) -> int:
    """Return the most bytes of a body, with integers of ``width`` bytes each."""
    return head_bytes(coordinates, bucket_size) + width * coordinates


def head_bytes(coordinates: int, bucket_size: int) -> int:
    """Return the bytes of ``kind`` and the steps."""
    return 4 + 4 * -(-coordinates // bucket_size)


def step_factors(coordinates: int, bucket_size: int, delta: float) -> np.ndarray:
    """Return the factors that turn a bucket's norm into its step, delta root mean squares: float32,
    for a whole bucket and for the last one.
    """
    rest = coordinates - (-(-coordinates // bucket_size) - 1) * bucket_size
    return (delta / np.sqrt(np.array([bucket_size, max(rest, 1)], float))).astype(np.float32)


def opened(
    data: np.ndarray, bucket_size: int, width: int, coordinates: int
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """Return the steps of a body (uint8), its segments (uint8; None if it is not coded), and its
    integers (int32; empty if it is coded). Raise PayloadError if it cannot be read.
    """
    at = head_bytes(coordinates, bucket_size)
    if data.size < at:
        raise PayloadError(f"payload's body of {data.size} bytes is too short")
    kind, steps = int(data[:4].view("<u4")[0]), data[4:at].view("<f4")
    if not np.all((steps >= 0) & (steps < np.inf) | np.isnan(steps)):
        raise PayloadError("payload holds impossible steps")
    if kind == CODED:
        return steps, data[at:], np.empty(0, np.int32)
    if kind != width:
        raise PayloadError(f"payload's body is of kind {kind}, not {CODED} or {width}")
    check_end(data[at:], width * coordinates)
    return steps, None, data[at : at + width * coordinates].view(WIDTHS[width]).astype(np.int32)


def checked_ends(data: np.ndarray, segments: int) -> tuple[np.ndarray, np.ndarray]:
    """Return 0 and the ends (int64) of codes and escapes, and the data behind these numbers. Raise
    PayloadError if they do not fit each other.
    """
    head = 8 * segments
    if data.size < head:
        raise PayloadError(f"payload's body is too short for {segments} segments")
    ends = np.concatenate([[0], data[:head].view("<u4").astype(np.int64)])
    if np.any(np.diff(ends) < 0):
        raise PayloadError("payload's segments have impossible ends")
    check_end(data[head:], int(ends[-1]))
    return ends, data[head:]


def check_end(data: np.ndarray, size: int) -> None:
    """Raise PayloadError unless ``size`` bytes and up to 7 zeros are all of ``data``."""
    if not 0 <= data.size - size <= 7 or np.any(data[size:]):
        raise PayloadError(f"payload's body goes on for {data.size - size} bytes behind its end")


def corrupt_segment(index: int) -> PayloadError:
    """Return the error for a segment that cannot be read."""
    return PayloadError(f"payload's segment {index} is corrupt")
