"""Sort a bucket's coordinates in ascending order in Numba, by radix sort (no comparisons)."""

from __future__ import annotations

import numpy as np

from hvd_adaptive.kernels.numba.jit import inline

DIGIT_BITS = 11
PASSES = 3
BINS = 1 << DIGIT_BITS
# Shorter buckets are sorted by comparisons: clearing the counters would cost more.
LEAST_RADIX = 160

_SIGN, _ALL = np.uint32(0x80000000), np.uint32(0xFFFFFFFF)
_MASK, _DIGIT = np.uint32(BINS - 1), np.uint32(DIGIT_BITS)


@inline
def sort_floats(x, ordered, keys, spare, counts):
    """Set ordered to ``x`` (float32, (n,), no NaN) in ascending order; -0 counts as 0.

    ordered: float32 (n,). keys, spare: uint32 (n,). counts: int64 (PASSES, BINS).
    """
    for i in range(x.size):
        ordered[i] = x[i] + np.float32(0)
    if x.size < LEAST_RADIX:
        ordered[:] = np.sort(ordered)
        return
    bits = ordered.view(np.uint32)
    counts[:] = 0
    # Keys have the order of the numbers: negative ones are inverted, the others get the sign bit.
    for i in range(bits.size):
        key = np.uint32(bits[i] ^ (_ALL if bits[i] >= _SIGN else _SIGN))
        keys[i] = key
        counts[0, np.uint64(key & _MASK)] += 1
        counts[1, np.uint64(np.uint32(key >> _DIGIT) & _MASK)] += 1
        counts[2, np.uint64(np.uint32(key >> np.uint32(2 * DIGIT_BITS)))] += 1
    _scatter(keys, spare, counts[0], np.uint32(0))
    _scatter(spare, keys, counts[1], _DIGIT)
    _scatter(keys, spare, counts[2], np.uint32(2 * DIGIT_BITS))
    for i in range(bits.size):
        key = spare[i]
        bits[i] = np.uint32(key ^ (_SIGN if key >= _SIGN else _ALL))


@inline
def _scatter(keys, out, counts, shift):
    """Sort stably by the digit at ``shift``; the digits' counts become the ends of their places."""
    place = 0
    for k in range(BINS):
        count = counts[k]
        counts[k] = place
        place += count
    for i in range(keys.size):
        key = keys[i]
        k = np.uint64(np.uint32(key >> shift) & _MASK)
        out[np.uint64(counts[k])] = key
        counts[k] += 1
