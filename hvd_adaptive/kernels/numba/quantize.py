"""Find the index of the level to which a coordinate is rounded, in Numba, rule by rule.

Each function fills ``part`` with the codes of ``run``; tables.KernelTable defines them. ``ladder``
holds the codes of the indices 0, 1, 2, ... and ``total`` is the alphabet less one.
"""

from __future__ import annotations

import numpy as np

from hvd_adaptive.kernels import random
from hvd_adaptive.kernels.numba.jit import inline
from hvd_adaptive.kernels.tables import (
    CELL_BASE,
    CELL_SHIFT,
    HALF_BITS,
    LOG2_COEFFICIENTS,
    MANTISSA_BITS,
    UNIFORM_SCALE,
)

_MIX32_A, _MIX32_B = np.uint32(random.MIX32_A), np.uint32(random.MIX32_B)
_CELL_SHIFT, _CELL_BASE = np.int32(CELL_SHIFT), np.int32(CELL_BASE)
_HALF_BITS, _MANTISSA_BITS = np.int32(HALF_BITS), np.int32(MANTISSA_BITS)
_EXPONENT_SHIFT = np.int32(23)
_C0, _C1, _C2, _C3, _C4, _C5, _C6 = (np.float32(c) for c in LOG2_COEFFICIENTS)
_SCALE, _HALF_SCALE = UNIFORM_SCALE, np.float32(UNIFORM_SCALE / 2)
_ONE = np.float32(1)


@inline
def uniform24(counter, high):
    """Mix an integer below 2**24 from counter j * COUNTER + low (uint32) and the high key."""
    h = np.uint32(np.uint32(counter ^ np.uint32(counter >> np.uint32(16))) * _MIX32_A)
    h = np.uint32(h + high)
    h = np.uint32(np.uint32(h ^ np.uint32(h >> np.uint32(13))) * _MIX32_B)
    return np.float32(np.int32(np.uint32(h >> np.uint32(8))))


@inline
def _signed(code, v, total):
    return np.uint32(total - code) if v < 0 else code


@inline
def count_from(begin, run, inverse, steps, offset, high, start, gap, ladder, total, part):
    """Compare with any number of thresholds, for a few coordinates from ``begin`` on."""
    for j in range(begin, run.size):
        r = np.float32(np.abs(run[j]) * inverse)
        u = uniform24(np.uint32(steps[j] + offset), high)
        code = ladder[0]
        for t in range(start.size):
            code = np.uint32(code + np.uint32(r > start[t] + u * gap[t]))
        part[j] = _signed(code, run[j], total)


@inline
def count_many(run, inverse, steps, offset, high, start, gap, ladder, total, rs, us, part):
    """Compare with four more thresholds in each pass over the run."""
    for j in range(run.size):
        rs[j] = np.float32(np.abs(run[j]) * inverse)
        us[j] = uniform24(np.uint32(steps[j] + offset), high)
        part[j] = ladder[0]
    for t in range(0, start.size - 3, 4):
        a0, a1, a2, a3 = start[t], start[t + 1], start[t + 2], start[t + 3]
        g0, g1, g2, g3 = gap[t], gap[t + 1], gap[t + 2], gap[t + 3]
        for j in range(run.size):
            r, u = rs[j], us[j]
            low = np.uint32(np.uint32(r > a0 + u * g0) + np.uint32(r > a1 + u * g1))
            top = np.uint32(np.uint32(r > a2 + u * g2) + np.uint32(r > a3 + u * g3))
            part[j] = np.uint32(part[j] + np.uint32(low + top))
    for j in range(run.size):
        part[j] = _signed(part[j], run[j], total)


@inline
def search(
    run,
    inverse,
    steps,
    offset,
    high,
    start,
    gap,
    lower,
    cells,
    corrections,
    ladder,
    total,
    rs,
    us,
    part,
):
    """Find r's interval from a table of cells, then compare once.

    The look-ups do not vectorise (nor would gathers pay on many processors), so all else is done
    before them.
    """
    for j in range(run.size):
        r = np.float32(np.abs(run[j]) * inverse)
        rs[j] = r
        us[j] = uniform24(np.uint32(steps[j] + offset), high)
        cell = np.int32(np.int32(r.view(np.int32) >> _CELL_SHIFT) - _CELL_BASE)
        part[j] = np.uint32(max(cell, np.int32(0)))
    for j in range(run.size):
        i, r = np.uint64(cells[np.uint64(part[j])]), rs[j]
        for _ in range(corrections):
            i += np.uint64(lower[i + np.uint64(1)] < r)
        i += np.uint64(r > start[i] + us[j] * gap[i])
        part[j] = _signed(np.uint32(np.uint32(i) + ladder[0]), run[j], total)


@inline
def uniform(run, inverse, steps, offset, high, numbers, ladder, total, part):
    slope, shift, first = numbers[0], numbers[1], ladder[0]
    for j in range(run.size):
        r = np.float32(np.abs(run[j]) * inverse)
        y = np.float32(np.float32((r if r < _ONE else _ONE) * slope) + shift)
        u = uniform24(np.uint32(steps[j] + offset), high)
        i = np.int32(y)
        fraction = np.float32(y - np.float32(i))
        above = np.uint32(fraction > np.float32(u * _SCALE) + _HALF_SCALE)
        part[j] = _signed(np.uint32(np.uint32(np.uint32(i) + above) + first), run[j], total)


@inline
def exponential(
    run,
    inverse,
    steps,
    offset,
    high,
    start,
    gap,
    lower,
    thresholds,
    numbers,
    ladder,
    total,
    rs,
    us,
    part,
):
    """Find the index on an exponential table in two loops, so that bits of float32 numbers can be
    read from memory as integers.
    """
    gain, first, per_octave, top = numbers[0], numbers[1], numbers[2], numbers[3]
    a0, g0, least, code = start[0], gap[0], lower[1], ladder[0]
    most = np.int32(thresholds)
    for j in range(run.size):
        r = np.float32(np.abs(run[j]) * inverse)
        u = uniform24(np.uint32(steps[j] + offset), high)
        rs[j] = r / (u * gain + first)
        # This is the index below ``least`` if it applies, else a number that no index reaches.
        us[j] = np.float32(4096) if r > least else np.float32(r > a0 + u * g0)
    bits = rs.view(np.int32)
    for j in range(run.size):
        b = np.int32(bits[j] - _HALF_BITS)
        t = np.float32(np.int32(np.int32(b & _MANTISSA_BITS) + _HALF_BITS).view(np.float32) - _ONE)
        p = (((((_C6 * t + _C5) * t + _C4) * t + _C3) * t + _C2) * t + _C1) * t + _C0
        log2 = np.float32(np.int32(b >> _EXPONENT_SHIFT)) + p * t
        m = np.int32(log2 * per_octave + top)
        m = min(max(m, np.int32(1)), most)
        m = np.int32(us[j]) if us[j] < np.float32(2) else m
        part[j] = _signed(np.uint32(np.uint32(m) + code), run[j], total)
