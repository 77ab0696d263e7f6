"""Numba: norm, stochastic rounding and packing in one trip to memory."""

from __future__ import annotations

import numpy as np

from hvd_adaptive.coding.fixed import BLOCK, LANES, QUARTERS, ROWS
from hvd_adaptive.kernels import random
from hvd_adaptive.kernels.cpu_pack import merge_quarters, store_block, store_partial
from hvd_adaptive.kernels.cpu_scan import norm_of
from hvd_adaptive.kernels.jit import inline, jit
from hvd_adaptive.kernels.reference import NORM_LANES
from hvd_adaptive.kernels.tables import CELL_BASE, CELL_SHIFT

_QUARTER = ROWS * LANES
_GOLDEN64 = np.uint64(random.GOLDEN64)
_MIX64_A, _MIX64_B = np.uint64(random.MIX64_A), np.uint64(random.MIX64_B)
_COUNTER = np.uint32(random.COUNTER)
_MIX32_A, _MIX32_B = np.uint32(random.MIX32_A), np.uint32(random.MIX32_B)
_CELL_SHIFT, _CELL_BASE = np.int32(CELL_SHIFT), np.int32(CELL_BASE)
_LOW = np.uint64(0xFFFFFFFF)
_ONE = np.uint32(1)


@inline
def _bucket_key(stream, bucket):
    key = stream + np.uint64(np.uint64(bucket + 1) * _GOLDEN64)
    key = np.uint64((key ^ (key >> np.uint64(30))) * _MIX64_A)
    key = np.uint64((key ^ (key >> np.uint64(27))) * _MIX64_B)
    return np.uint64(key ^ (key >> np.uint64(31)))


@inline
def _uniform(counter, high):
    """An integer below 2**24 from the counter j * COUNTER + low (uint32) and the high key."""
    h = np.uint32(np.uint32(counter ^ np.uint32(counter >> np.uint32(16))) * _MIX32_A)
    h = np.uint32(h + high)
    h = np.uint32(np.uint32(h ^ np.uint32(h >> np.uint32(13))) * _MIX32_B)
    return np.float32(np.int32(np.uint32(h >> np.uint32(8))))


@inline
def _pick2(r, u, a0, a1, g0, g1, c0, c1, c2):
    """The code after the last threshold that r exceeds. Selections of codes that the compiler
    cannot know to be consecutive cost one instruction each; counting comparisons costs two."""
    c = c1 if r > a0 + u * g0 else c0
    return c2 if r > a1 + u * g1 else c


@inline
def _pick4(r, u, a0, a1, a2, a3, g0, g1, g2, g3, c0, c1, c2, c3, c4):
    c = _pick2(r, u, a0, a1, g0, g1, c0, c1, c2)
    c = c3 if r > a2 + u * g2 else c
    return c4 if r > a3 + u * g3 else c


@inline
def _quantize_by_counting(run, inverse, steps, offset, high, start, gap, first, sign, rs, us, part):
    """Codes for 16 or 32 thresholds: four more are compared with in each pass over the run."""
    for j in range(run.size):
        rs[j] = np.float32(np.abs(run[j]) * inverse)
        us[j] = _uniform(np.uint32(steps[j] + offset), high)
        part[j] = first
    for t in range(0, start.size - 3, 4):
        a0, a1, a2, a3 = start[t], start[t + 1], start[t + 2], start[t + 3]
        g0, g1, g2, g3 = gap[t], gap[t + 1], gap[t + 2], gap[t + 3]
        for j in range(run.size):
            r, u = rs[j], us[j]
            low = np.uint32(np.uint32(r > a0 + u * g0) + np.uint32(r > a1 + u * g1))
            top = np.uint32(np.uint32(r > a2 + u * g2) + np.uint32(r > a3 + u * g3))
            part[j] = np.uint32(part[j] + np.uint32(low + top))
    for j in range(run.size):
        c = part[j]
        part[j] = np.uint32(c ^ sign) if run[j] < 0 else c


@inline
def _quantize_by_search(
    run, inverse, steps, offset, high, start, gap, lower, search, corrections, first, sign, rs, us,
    part,
):  # fmt: skip
    """The same codes for many thresholds: r's interval from a table, then one comparison.

    Three loops over an L1-sized run, so that each is vectorised with gathers; indices are unsigned,
    which spares Numba's test for negative ones.
    """
    for j in range(run.size):
        r = np.float32(np.abs(run[j]) * inverse)
        rs[j] = r
        us[j] = _uniform(np.uint32(steps[j] + offset), high)
        cell = np.int32(np.int32(r.view(np.int32) >> _CELL_SHIFT) - _CELL_BASE)
        part[j] = search[np.uint32(max(cell, np.int32(0)))]
    for _ in range(corrections):
        for j in range(run.size):
            part[j] = np.uint32(part[j] + np.uint32(lower[np.uint32(part[j] + _ONE)] < rs[j]))
    for j in range(run.size):
        i = part[j]
        above = np.uint32(rs[j] > start[i] + us[j] * gap[i])
        c = np.uint32(np.uint32(i + above) + first)
        part[j] = np.uint32(c ^ sign) if run[j] < 0 else c


def make_encoder(bits: int):
    """The encoder for one width; ``bits`` is a constant of the compiled code."""

    @jit
    def encode(
        x,
        scales,
        words,
        bucket_size,
        linf,
        stream,
        start,
        gap,
        lower,
        ladder,
        search,
        corrections,
        negative,
    ):
        codes, rows = np.empty(BLOCK, np.uint32), np.empty(_QUARTER, np.uint32)
        acc, cell = np.empty(NORM_LANES, np.float32), np.empty(1, np.float32)
        rs, us = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
        steps = np.empty(BLOCK, np.uint32)  # j * COUNTER: loading it beats multiplying
        for j in range(BLOCK):
            steps[j] = np.uint32(j) * _COUNTER
        for bucket in range(scales.size):
            begin = bucket * bucket_size
            end = min(x.size, begin + bucket_size)
            scale = norm_of(x[begin:end], linf, acc, cell)
            scales[bucket] = scale
            usable, sign = scale > 0, np.uint32(negative)
            inverse = np.float32(1) / scale if usable else np.float32(0)
            key = _bucket_key(stream, bucket)
            low, high = np.uint32(key & _LOW), np.uint32(key >> np.uint64(32))
            a0, a1, g0, g1 = start[0], start[1], gap[0], gap[1]
            c0, c1, c2 = ladder[0], ladder[1], ladder[2]
            if bits > 2:
                a2, a3, g2, g3 = start[2], start[3], gap[2], gap[3]
                c3, c4 = ladder[3], ladder[4]
            if bits == 4:
                a4, a5, g4, g5 = start[4], start[5], gap[4], gap[5]
                a6, a7, g6, g7 = start[6], start[7], gap[6], gap[7]
                c5, c6, c7, c8 = ladder[5], ladder[6], ladder[7], ladder[8]
            i = begin
            while i < end:
                at = i % BLOCK
                stop = min(end, i - at + BLOCK)
                run = x[i:stop]
                part = codes[at : at + stop - i]
                offset = np.uint32(np.uint32(np.uint32(i - begin) * _COUNTER) + low)
                if not usable:
                    part[:] = np.uint32(0)
                elif 4 < bits < 7:
                    _quantize_by_counting(
                        run, inverse, steps, offset, high, start, gap, ladder[0], sign, rs, us, part
                    )
                elif bits > 6:
                    _quantize_by_search(
                        run, inverse, steps, offset, high, start, gap, lower, search, corrections,
                        ladder[0], sign, rs, us, part,
                    )  # fmt: skip
                else:
                    for j in range(run.size):
                        v = run[j]
                        r = np.abs(v) * inverse
                        u = _uniform(np.uint32(steps[j] + offset), high)
                        if bits <= 2:
                            c = _pick2(r, u, a0, a1, g0, g1, c0, c1, c2)
                        else:
                            c = _pick4(r, u, a0, a1, a2, a3, g0, g1, g2, g3, c0, c1, c2, c3, c4)
                        if bits == 4:
                            c = _pick4(r, u, a4, a5, a6, a7, g4, g5, g6, g7, c, c5, c6, c7, c8)
                        part[j] = np.uint32(c ^ sign) if v < 0 else c
                if stop % BLOCK == 0:
                    merge_quarters(codes, _QUARTER, bits, rows)
                    block = (stop // BLOCK - 1) * bits * LANES
                    store_block(rows, bits, words[block : block + bits * LANES])
                i = stop
        rest = x.size % BLOCK
        if rest:
            count = (rest + QUARTERS * LANES - 1) // (QUARTERS * LANES)
            codes[rest : QUARTERS * LANES * count] = np.uint32(0)
            merge_quarters(codes, LANES * count, bits, rows)
            store_partial(rows, count, bits, words[x.size // BLOCK * bits * LANES :])

    return encode
