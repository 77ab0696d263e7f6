"""Round coordinates to the levels of a table in Triton, rule by rule.

tables.KernelTable defines the rules; encoder.py describes how ``prepare`` and the functions of the
rules are called. ``state`` begins with the buckets' scales and limits; ``OPTIONS`` begins with
thresholds, base, alphabet, clip.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from hvd_adaptive.kernels.tables import HALF_BITS, LOG2_COEFFICIENTS, MANTISSA_BITS, KernelTable
from hvd_adaptive.kernels.triton.lanes import clamped
from hvd_adaptive.kernels.triton.launch import on_device
from hvd_adaptive.kernels.triton.uniforms import uniform24

# More thresholds than these are searched: a comparison costs four instructions and two registers; a
# step of a search, which halves the rest, costs five.
MOST_COUNTED = 4

_HALF_BITS, _MANTISSA_BITS = tl.constexpr(HALF_BITS), tl.constexpr(MANTISSA_BITS)
_C0, _C1, _C2, _C3, _C4, _C5, _C6 = (tl.constexpr(c) for c in LOG2_COEFFICIENTS)
_STATE = tl.constexpr(2)


@triton.jit
def of_scale(scale):
    """Prepare a bucket with this norm: return (1/norm or 0, whether it has levels)."""
    usable = scale > 0
    one = tl.full(scale.shape, 1.0, tl.float32)
    return tl.where(usable, tl.div_rn(one, scale), 0.0), usable


@triton.jit
def prepare(bucket, there, state, OPTIONS: tl.constexpr):
    """Prepare buckets (int64): return ``of_scale``, and the limit of magnitudes."""
    inverse, usable = of_scale(tl.load(state[0] + bucket, mask=there, other=0.0))
    limit = tl.load(state[1] + bucket, mask=there, other=0.0) if OPTIONS[3] else inverse
    return inverse, usable, limit


@triton.jit
def _drawn(v, counter, high, about, OPTIONS: tl.constexpr):
    """Return v within its limit, r, and the random integer."""
    if OPTIONS[3]:
        v = clamped(v, about[2])
    return v, tl.abs(v) * about[0], uniform24(counter, high)


@triton.jit
def _code(m, v, about, OPTIONS: tl.constexpr):
    """Return the code (uint32) of index m."""
    code = (m + OPTIONS[1]).to(tl.uint32)
    code = tl.where(v < 0, OPTIONS[2] - 1 - code, code)
    return tl.where(about[1], code, OPTIONS[2] // 2)


@triton.jit
def count(v, counter, high, about, state, there, OPTIONS: tl.constexpr):
    """Count the ascending thresholds that r exceeds; starts and gaps are kernel arguments."""
    v, r, u = _drawn(v, counter, high, about, OPTIONS)
    THRESHOLDS: tl.constexpr = OPTIONS[0]
    m = tl.zeros(r.shape, tl.int32)
    for j in tl.static_range(THRESHOLDS):
        start = tl.cast(state[_STATE + 2 * j], tl.float32)
        gap = tl.cast(state[_STATE + 2 * j + 1], tl.float32)
        m = tl.where(r > start + u * gap, j + 1, m)
    return _code(m, v, about, OPTIONS)


@triton.jit
def search(v, counter, high, about, state, there, OPTIONS: tl.constexpr):
    """Find r's interval by bisection, then compare once; see ``_search_rows`` for the arrays."""
    v, r, u = _drawn(v, counter, high, about, OPTIONS)
    STEPS: tl.constexpr = OPTIONS[5]
    lower, room = state[_STATE], OPTIONS[4]
    m = tl.zeros(r.shape, tl.int32)
    for half in tl.static_range(STEPS):
        step = room >> (half + 1)
        m = tl.where(tl.load(lower + m + step) < r, m + step, m)
    start, gap = tl.load(lower + room + m), tl.load(lower + 2 * room + m)
    return _code(m + (r > start + u * gap).to(tl.int32), v, about, OPTIONS)


@triton.jit
def uniform(v, counter, high, about, state, there, OPTIONS: tl.constexpr):
    v, r, u = _drawn(v, counter, high, about, OPTIONS)
    slope, offset = state[_STATE], state[_STATE + 1]
    y = tl.where(r < 1.0, r, 1.0) * slope + offset
    whole = y.to(tl.int32)
    fraction = u * 2.0**-24 + 2.0**-25
    m = whole + (y - whole.to(tl.float32) > fraction).to(tl.int32)
    return _code(m, v, about, OPTIONS)


@triton.jit
def exponential(v, counter, high, about, state, there, OPTIONS: tl.constexpr):
    """Find the index by the logarithm of w."""
    v, r, u = _drawn(v, counter, high, about, OPTIONS)
    gain, first = tl.cast(state[_STATE], tl.float32), state[_STATE + 1]
    per_octave, top = state[_STATE + 2], state[_STATE + 3]
    start, gap = tl.cast(state[_STATE + 4], tl.float32), tl.cast(state[_STATE + 5], tl.float32)
    least = tl.cast(state[_STATE + 6], tl.float32)
    bits = tl.div_rn(r, u * gain + first).to(tl.int32, bitcast=True) - _HALF_BITS
    t = ((bits & _MANTISSA_BITS) + _HALF_BITS).to(tl.float32, bitcast=True) - 1.0
    p = (((((_C6 * t + _C5) * t + _C4) * t + _C3) * t + _C2) * t + _C1) * t + _C0
    log2 = (bits >> 23).to(tl.float32) + p * t
    m = tl.minimum(tl.maximum((log2 * per_octave + top).to(tl.int32), 1), OPTIONS[0])
    m = tl.where(r > least, m, (r > start + u * gap).to(tl.int32))
    return _code(m, v, about, OPTIONS)


def rule_of(table: KernelTable, device: torch.device) -> tuple[Any, tuple, tuple]:
    """Return CODE for a table's rule, its entries in ``state`` behind scales and limits, and its
    ``OPTIONS`` behind the first four.
    """
    if table.rule == "uniform":
        return uniform, tuple(table.numbers[:2].tolist()), ()
    if table.rule == "exponential":
        lowest = (table.start[0], table.gap[0], table.lower[1])
        return exponential, (*table.numbers.tolist(), *map(float, lowest)), ()
    if table.thresholds > MOST_COUNTED:
        rows = _search_rows(table, device)
        return search, (rows,), (rows.shape[1], rows.shape[1].bit_length() - 1)
    pairs = np.stack([table.start, table.gap], axis=1)
    return count, tuple(pairs.reshape(-1).tolist()), ()


@functools.lru_cache(maxsize=64)
def _search_rows(table: KernelTable, device: torch.device) -> torch.Tensor:
    """Return float32 (3, a power of two): lower ends, padded by infinity, starts and gaps."""
    rows = np.full((3, 1 << (table.thresholds - 1).bit_length()), np.inf, np.float32)
    for row, values in zip(rows, (table.lower, table.start, table.gap), strict=True):
        row[: table.thresholds] = values
    return on_device(rows, device)
