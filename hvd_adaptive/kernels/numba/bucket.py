"""Pack and unpack codes of buckets that have levels of their own, in Numba."""

from __future__ import annotations

import functools

import numpy as np

from hvd_adaptive.kernels.numba.codes import chunk_size, store_fixed, store_units
from hvd_adaptive.kernels.numba.decoder import make_decoder
from hvd_adaptive.kernels.numba.jit import inline, jit
from hvd_adaptive.kernels.numba.random import STEPS, bucket_key, counter_of, uniform24
from hvd_adaptive.kernels.packing import BLOCK, LANES, Packing, check_sections, packing_of
from hvd_adaptive.kernels.tables import padded_values

_UNIT = np.float32(2.0**-24)
# A payload's levels take the place of the decoder's shared ones.
_NO_VALUES = np.zeros(16, np.float32)


def round_codes(flat, levels, words, bucket_size, key):
    rounder = _rounder(packing_of(levels.shape[1]))
    out = words.numpy().view(np.uint32)
    rounder(flat.numpy(), levels.numpy(), out, bucket_size, np.uint64(key))


def cut_codes(flat, cuts, words, bucket_size):
    _cut(flat.numpy(), cuts.numpy(), words.numpy().view(np.uint32), bucket_size)


def decode_add(payloads, bucket_size, factor, out):
    packing = packing_of(payloads[0][0].shape[1])
    count = packing.words(out.numel())
    check_sections(payloads, "buckets", -(-out.numel() // bucket_size), count)
    tables = [padded_values(values, packing) for values, _ in payloads]
    table_at = np.array([table.data_ptr() for table in tables], dtype=np.int64)
    word_at = np.array([words.data_ptr() for _, words in payloads], dtype=np.int64)
    room = tables[0].shape[1]
    factor, values = np.float32(factor), _NO_VALUES
    decoder = _decoder(True, False, 0, packing)
    decoder(table_at, word_at, count, bucket_size, room, values, factor, True, out.numpy())


_decoder = functools.cache(make_decoder)


@inline
def _scaled(levels, base, gap):
    """Fill base and gap, padded by values that nothing exceeds; return the factor of the bucket."""
    last = levels.size - 1
    base[:], gap[:] = np.float32(np.inf), np.float32(0)
    largest = max(np.abs(levels[0]), np.abs(levels[last]))
    if not largest > 0:  # zero or NaN
        return np.float32(0)
    bits = np.float32(largest).view(np.uint32)
    exponent = np.uint32(max(bits >> np.uint32(23), np.uint32(1)))
    factor = np.uint32(np.uint32(np.uint32(255) - exponent) << np.uint32(23)).view(np.float32)
    for j in range(last):
        base[j] = levels[j] * factor
        gap[j] = np.float32(np.float32(levels[j + 1] * factor) - base[j]) * _UNIT
    return factor


@inline
def _odd(counter, high):
    """Return k | 1 for the coordinate's integer k."""
    return np.float32(np.int32(np.int32(uniform24(counter, high)) | np.int32(1)))


@inline
def _pick4(x, u, b0, b1, b2, b3, g0, g1, g2, g3, c0, c1, c2, c3, c4):
    """Return the code after the last of four thresholds that x exceeds."""
    c = c1 if x - b0 > u * g0 else c0
    c = c2 if x - b1 > u * g1 else c
    c = c3 if x - b2 > u * g2 else c
    return c4 if x - b3 > u * g3 else c


@inline
def _count_one(run, factor, offset, high, base, gap, part):
    b0, g0 = base[0], gap[0]
    for j in range(run.size):
        u = _odd(np.uint32(STEPS[j] + offset), high)
        part[j] = np.uint32(run[j] * factor - b0 > u * g0)


@inline
def _count_four(run, factor, offset, high, base, gap, ladder, us, part):
    """Count the first four thresholds; keep the random numbers."""
    b0, b1, b2, b3 = base[0], base[1], base[2], base[3]
    g0, g1, g2, g3 = gap[0], gap[1], gap[2], gap[3]
    c0, c1, c2, c3, c4 = ladder[0], ladder[1], ladder[2], ladder[3], ladder[4]
    for j in range(run.size):
        u = _odd(np.uint32(STEPS[j] + offset), high)
        us[j] = u
        part[j] = _pick4(run[j] * factor, u, b0, b1, b2, b3, g0, g1, g2, g3, c0, c1, c2, c3, c4)


@inline
def _count_on(run, factor, base, gap, ladder, us, part):
    """Count four more thresholds."""
    b0, b1, b2, b3 = base[0], base[1], base[2], base[3]
    g0, g1, g2, g3 = gap[0], gap[1], gap[2], gap[3]
    c1, c2, c3, c4 = ladder[1], ladder[2], ladder[3], ladder[4]
    for j in range(run.size):
        x, u, c0 = run[j] * factor, us[j], part[j]
        part[j] = _pick4(x, u, b0, b1, b2, b3, g0, g1, g2, g3, c0, c1, c2, c3, c4)


@functools.cache
def _rounder(packing: Packing):
    chunk = chunk_size(packing)
    alphabet, digits, width = packing
    thresholds = alphabet - 1
    room = -(-thresholds // 4) * 4

    @jit
    def round_codes(x, levels, words, bucket_size, stream):
        codes, units = np.empty(chunk, np.uint32), np.empty(LANES, np.uint32)
        us, ladder = np.empty(chunk, np.float32), np.arange(room + 1).astype(np.uint32)
        base, gap = np.empty(room, np.float32), np.empty(room, np.float32)
        for b in range(levels.shape[0]):
            begin = b * bucket_size
            end = min(x.size, begin + bucket_size)
            factor = _scaled(levels[b], base, gap)
            low, high = bucket_key(stream, b)
            i = begin
            while i < end:
                at = i % chunk
                stop = min(end, i - at + chunk)
                offset = counter_of(i - begin, low)
                part = codes[at : at + stop - i]
                run = x[i:stop]
                if thresholds == 1:
                    _count_one(run, factor, offset, high, base, gap, part)
                else:
                    _count_four(run, factor, offset, high, base, gap, ladder, us, part)
                    for t in range(4, room, 4):
                        _count_on(run, factor, base[t:], gap[t:], ladder[t:], us, part)
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

    return round_codes


@jit
def _cut(x, cuts, words, bucket_size):
    codes, units = np.empty(BLOCK, np.uint32), np.empty(LANES, np.uint32)
    for begin in range(0, x.size, BLOCK):
        end = min(x.size, begin + BLOCK)
        i = begin
        while i < end:
            bucket = i // bucket_size
            stop = min(end, (bucket + 1) * bucket_size)
            cut, run, part = cuts[bucket], x[i:stop], codes[i - begin : stop - begin]
            for j in range(run.size):
                part[j] = np.uint32(run[j] >= cut)
            i = stop
        store_fixed(codes, begin // BLOCK, end - begin, 1, units, words)
