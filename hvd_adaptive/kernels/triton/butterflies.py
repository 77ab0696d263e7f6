"""Apply the butterflies of Sylvester's Hadamard matrices in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

# A larger tile would not fit the registers.
LARGEST = 1 << 14
_TILE = 1 << 12
_COORDINATES_PER_WARP = 1 << 10


def tile_of(order: int) -> tuple[int, int]:
    """Return how many transforms of an order a program does, and its warps."""
    each = max(1, _TILE // order)
    return each, max(4, each * order // _COORDINATES_PER_WARP)


@triton.jit
def butterflies(x, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """Apply strides SIZE/2, ..., 1 in turn to COUNT numbers (a power of two)."""
    if SIZE > 1:
        HALF: tl.constexpr = SIZE // 2
        pairs = tl.permute(tl.reshape(x, (COUNT // SIZE, 2, HALF)), (0, 2, 1))
        a, b = tl.split(pairs)
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (COUNT,))
        x = butterflies(x, COUNT, HALF)
    return x
