"""Pack and unpack codes of buckets that have levels of their own, in Numba."""

from __future__ import annotations

import functools

import numpy as np

from hvd_adaptive.kernels.numba.codes import chunk_size, store_fixed, store_units
from hvd_adaptive.kernels.numba.decoder import addresses, decoder_of
from hvd_adaptive.kernels.numba.jit import inline, jit
from hvd_adaptive.kernels.numba.random import STEPS, bucket_key, counter_of, uniform24
from hvd_adaptive.kernels.packing import BLOCK, LANES, Packing, packing_of
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
    n, packing = out.numel(), packing_of(payloads[0][0].shape[1])
    pairs = [(padded_values(values, packing), words) for values, words in payloads]
    sections = addresses(pairs, "buckets", -(-n // bucket_size), packing.words(n))
    own = pairs[0][0].shape[1], _NO_VALUES, np.float32(factor), True
    decoder_of(True, False, packing)(*sections, bucket_size, *own, out.numpy())


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
def _odd(j, offset, high):
    """Return k | 1 for the integer k of coordinate j of a run."""
    k = uniform24(np.uint32(STEPS[j] + offset), high)
    return np.float32(np.int32(np.int32(k) | np.int32(1)))


@inline
def _compare(run, factor, offset, high, base, gap, part):
    """Set codes of coordinates that exceed the only threshold to 1, others to 0."""
    b0, g0 = base[0], gap[0]
    for j in range(run.size):
        part[j] = np.uint32(run[j] * factor - b0 > _odd(j, offset, high) * g0)


@inline
def _count(run, factor, us, base, gap, t, part):
    """Set codes of coordinates that exceed thresholds t + 1 to t + 4 to the last one's number."""
    b0, b1, b2, b3 = base[t], base[t + 1], base[t + 2], base[t + 3]
    g0, g1, g2, g3 = gap[t], gap[t + 1], gap[t + 2], gap[t + 3]
    c1, c2, c3, c4 = np.uint32(t + 1), np.uint32(t + 2), np.uint32(t + 3), np.uint32(t + 4)
    for j in range(run.size):
        x, u = run[j] * factor, us[j]
        c = c1 if x - b0 > u * g0 else part[j]
        c = c2 if x - b1 > u * g1 else c
        c = c3 if x - b2 > u * g2 else c
        part[j] = c4 if x - b3 > u * g3 else c


@functools.cache
def _rounder(packing: Packing):
    chunk = chunk_size(packing)
    alphabet, digits, width = packing

    @jit
    def round_codes(x, levels, words, bucket_size, stream):
        codes, units = np.empty(chunk, np.uint32), np.empty(LANES, np.uint32)
        us, room = np.empty(chunk, np.float32), (alphabet + 2) // 4 * 4
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
                run, part = x[i:stop], codes[at : at + stop - i]
                offset = counter_of(i - begin, low)
                if alphabet == 2:
                    _compare(run, factor, offset, high, base, gap, part)
                else:
                    for j in range(run.size):
                        us[j], part[j] = _odd(j, offset, high), np.uint32(0)
                    for t in range(0, room, 4):
                        _count(run, factor, us, base, gap, t, part)
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
