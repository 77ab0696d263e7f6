"""Compute the norm, round stochastically and pack in Numba, in one trip to memory.

The functions of the rules fill ``part`` with the codes of ``run``; tables.KernelTable defines them.
``at`` is 1/norm, the counter of the run's first coordinate, the key's high half, and the alphabet
less one. ``rs`` and ``us`` are room for a run.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from hvd_adaptive.kernels.constants import NORM_LANES
from hvd_adaptive.kernels.numba.codes import chunk_size, store_fixed, store_units
from hvd_adaptive.kernels.numba.jit import inline, jit
from hvd_adaptive.kernels.numba.permute import counted, permuted
from hvd_adaptive.kernels.numba.random import STEPS, bucket_key, counter_of, uniform24
from hvd_adaptive.kernels.numba.scan import clip_to, norm_of
from hvd_adaptive.kernels.packing import LANES, Packing
from hvd_adaptive.kernels.tables import (
    CELL_BASE,
    CELL_SHIFT,
    HALF_BITS,
    LOG2_COEFFICIENTS,
    MANTISSA_BITS,
    UNIFORM_SCALE,
)

# The rules that find the index; see permute.py for the first two.
COUNT, PERMUTE, SEARCH, UNIFORM, EXPONENTIAL = range(5)

_CELL_SHIFT, _CELL_BASE = np.int32(CELL_SHIFT), np.int32(CELL_BASE)
_HALF_BITS, _MANTISSA_BITS = np.int32(HALF_BITS), np.int32(MANTISSA_BITS)
_EXPONENT_SHIFT = np.int32(23)
_C0, _C1, _C2, _C3, _C4, _C5, _C6 = (np.float32(c) for c in LOG2_COEFFICIENTS)
_SCALE, _HALF_SCALE = UNIFORM_SCALE, np.float32(UNIFORM_SCALE / 2)
_ONE = np.float32(1)


class Table(NamedTuple):
    """Hold the arrays of a KernelTable. first: the code of index 0; cells, corrections: ``search``
    and ``corrections``; tree: see permute.tables.
    """

    start: Any
    gap: Any
    lower: Any
    first: Any
    thresholds: Any
    numbers: Any
    cells: Any
    corrections: Any
    tree: Any


@inline
def _drawn(run, j, at):
    """Return r and the random integer of coordinate j of the run."""
    return np.abs(run[j]) * at[0], uniform24(np.uint32(STEPS[j] + at[1]), at[2])


@inline
def _signed(code, v, at):
    return np.uint32(at[3] - code) if v < 0 else code


@inline
def _count_few(run, at, table, part):
    """Compare with any number of thresholds, for a few coordinates."""
    start, gap = table.start, table.gap
    for j in range(run.size):
        r, u = _drawn(run, j, at)
        code = table.first
        for t in range(start.size):
            code = np.uint32(code + np.uint32(r > start[t] + u * gap[t]))
        part[j] = _signed(code, run[j], at)


@inline
def _search(run, at, table, rs, us, part):
    """Find r's interval from a table of cells, then compare once.

    The look-ups do not vectorise (nor would gathers pay on many processors), so all else is done
    before them.
    """
    start, gap, lower, first = table.start, table.gap, table.lower, table.first
    cells, corrections = table.cells, table.corrections
    for j in range(run.size):
        r, us[j] = _drawn(run, j, at)
        rs[j] = r
        cell = np.int32(np.int32(np.float32(r).view(np.int32) >> _CELL_SHIFT) - _CELL_BASE)
        part[j] = np.uint32(max(cell, np.int32(0)))
    for j in range(run.size):
        i, r = np.uint64(cells[np.uint64(part[j])]), rs[j]
        for _ in range(corrections):
            i += np.uint64(lower[i + np.uint64(1)] < r)
        i += np.uint64(r > start[i] + us[j] * gap[i])
        part[j] = _signed(np.uint32(np.uint32(i) + first), run[j], at)


@inline
def _uniform(run, at, table, part):
    slope, shift, first = table.numbers[0], table.numbers[1], table.first
    for j in range(run.size):
        r, u = _drawn(run, j, at)
        y = np.float32(np.float32((r if r < _ONE else _ONE) * slope) + shift)
        i = np.int32(y)
        fraction = np.float32(y - np.float32(i))
        above = np.uint32(fraction > np.float32(u * _SCALE) + _HALF_SCALE)
        part[j] = _signed(np.uint32(np.uint32(np.uint32(i) + above) + first), run[j], at)


@inline
def _exponential(run, at, table, rs, us, part):
    """Find the index on an exponential table in two loops, so that bits of float32 numbers can be
    read from memory as integers.
    """
    numbers = table.numbers
    gain, first, per_octave, top = numbers[0], numbers[1], numbers[2], numbers[3]
    a0, g0, least, code = table.start[0], table.gap[0], table.lower[1], table.first
    most = np.int32(table.thresholds)
    for j in range(run.size):
        r, u = _drawn(run, j, at)
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
        part[j] = _signed(np.uint32(np.uint32(m) + code), run[j], at)


@functools.cache
def encoder_of(rule: int, depth: int, packing: Packing):
    """Return the encoder for one rule and packing, which are constants of the compiled code.

    depth: of the search tree if the rule is PERMUTE, the thresholds if it is COUNT. arrays: those
    of a Table.
    """
    chunk = chunk_size(packing)
    alphabet, digits, width = packing

    @jit
    def encode(x, scales, words, bucket_size, linf, clip, stream, arrays):
        table = Table(*arrays)
        codes, units = np.empty(chunk, np.uint32), np.empty(LANES, np.uint32)
        acc = np.empty(NORM_LANES, np.float32)
        rs, us = np.empty(chunk, np.float32), np.empty(chunk, np.float32)
        clipped = np.empty(bucket_size if clip > 0 else 0, np.float32)
        total = np.uint32(alphabet - 1)
        for b in range(scales.size):
            begin = b * bucket_size
            end = min(x.size, begin + bucket_size)
            bucket = x[begin:end]
            if clip > 0:
                clip_to(bucket, clip, acc, clipped[: bucket.size])
                bucket = clipped[: bucket.size]
            scale = norm_of(bucket, linf, acc)
            scales[b] = scale
            usable = scale > 0
            inverse = np.float32(1) / scale if usable else np.float32(0)
            low, high = bucket_key(stream, b)
            i = begin
            while i < end:
                first = i % chunk
                stop = min(end, i - first + chunk)
                run = bucket[i - begin : stop - begin]
                part = codes[first : first + stop - i]
                at = inverse, counter_of(i - begin, low), high, total
                if not usable:
                    part[:] = np.uint32(alphabet // 2)  # any code would do; coders make it short
                elif rule == SEARCH:
                    _search(run, at, table, rs, us, part)
                elif rule <= PERMUTE:
                    if rule == COUNT:
                        done = counted(
                            run, STEPS, part, at, table.start, table.gap, table.first, depth
                        )
                    else:
                        done = permuted(run, STEPS, part, at, table.tree, table.first, depth)
                    at = inverse, counter_of(i - begin + done, low), high, total
                    _count_few(run[done:], at, table, part[done:])
                elif rule == UNIFORM:
                    _uniform(run, at, table, part)
                else:
                    _exponential(run, at, table, rs, us, part)
                if stop % chunk == 0 or stop == x.size:
                    index = (stop - 1) // chunk
                    rest = stop - index * chunk
                    if digits > 1:
                        store_units(
                            codes, index, rest, chunk, alphabet, digits, width, units, words
                        )
                    else:
                        store_fixed(codes, index, rest, width, units, words)
                i = stop

    return encode
