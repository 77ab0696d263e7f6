"""Sparsify at random in Numba, bucket by bucket. Arrays are NumPy's."""

from __future__ import annotations

import numpy as np

from hvd_adaptive.kernels.constants import NORM_LANES, SMALLEST_NORM
from hvd_adaptive.kernels.numba.bits import bits_at, next_one, put_bits
from hvd_adaptive.kernels.numba.jit import inline, jit
from hvd_adaptive.kernels.numba.random import STEPS, bucket_key, counter_of, uniform24
from hvd_adaptive.kernels.numba.scan import lane_sum, largest_bits
from hvd_adaptive.kernels.sparse import most_words
from hvd_adaptive.kernels.tables import UNIFORM_SCALE

_CHUNK = 512
_SMALLEST = np.float32(SMALLEST_NORM)
_SCALE, _HALF_SCALE = UNIFORM_SCALE, np.float32(UNIFORM_SCALE / 2)
_ZERO, _INF, _NAN = np.float32(0), np.float32(np.inf), np.float32(np.nan)
_INFINITE = np.uint32(0x7F800000)
_WORD, _LOG = 32, 5  # bits of a word, and their logarithm


def encode(flat, bucket_size, density, k, key):
    """Keep coordinates of ``flat`` (float32, (n,)) at random: see schemes/sparse.py.

    Return each bucket's threshold λ (float32; 0 for a zero bucket, NaN for a bucket with NaN or Inf
    or whose λ overflows), the values that are sent exactly (float32), and the stream of
    kernels/sparse.py with parameter ``k`` (uint32).
    """
    lambdas = np.empty(-(-flat.size // bucket_size), np.float32)
    # Pages of these arrays that are never written take no memory.
    exact, words = np.empty(flat.size, np.float32), np.zeros(most_words(flat.size, k), np.uint32)
    rooms = lambdas, exact, words
    count, bits = _encode(flat, bucket_size, density, np.int64(k), np.uint64(key), *rooms)
    return lambdas, exact[:count], words[: -(-bits // _WORD)]


@inline
def _size(v):
    size = np.abs(v)
    return _ZERO if size < _SMALLEST else size


@inline
def _below(v, limit):
    size = _size(v)
    return np.float64(size) if size < limit else np.float64(0)


@inline
def _count_from(x, limit):
    count = np.int32(0)
    for i in range(x.size):
        count += np.int32(_size(x[i]) >= limit)
    return np.int64(count)


@inline
def _threshold(x, density, acc):
    """Return λ of one bucket: the sum of min(1, abs(v)/λ) is ``density`` times its size.

    This is Wangni et al.'s Algorithm 3, whose factor is 1/λ: start from λ as if no coordinate
    reached it, then leave out those that do, until no more do. λ falls, so the loop ends with the
    solution or its next neighbour. If rounding makes λ rise, fewer coordinates reach it, and that
    also ends the loop. λ is rounded up, so that no more coordinates than the density allows reach
    it. Coordinates below the normal range count as zeros.
    """
    wanted = density * x.size
    if largest_bits(x) >= _INFINITE:
        return _NAN
    rest, exact = lane_sum(x, _below, _INF, acc), np.int64(0)
    if rest == 0:
        return _ZERO
    while True:
        goal = rest / (wanted - exact)
        limit = np.float32(goal)
        if np.float64(limit) < goal:
            limit = np.nextafter(limit, _INF)
        if not limit < _INF:
            return _NAN
        before = exact
        exact = _count_from(x, limit)
        rest = lane_sum(x, _below, limit, acc)
        if exact <= before or rest == 0 or exact >= wanted:
            return limit


@inline
def _mark(x, limit, offset, high, marks):
    """Mark coordinates: 0 if dropped, 1 if rounded to plus or minus ``limit``, 2 if exact."""
    for j in range(x.size):
        size = _size(x[j])
        u = uniform24(np.uint32(STEPS[j] + offset), high)
        kept = np.uint8(np.float32(size / limit) > np.float32(u * _SCALE) + _HALF_SCALE)
        kept = np.uint8(0) if size == _ZERO else kept
        marks[j] = np.uint8(2) if size >= limit else kept


@jit
def _encode(x, bucket_size, density, k, stream, lambdas, exact, words):
    acc = np.empty(NORM_LANES, np.float64)
    marks = np.zeros(_CHUNK, np.uint8)
    octets = marks.view(np.uint64)
    low_bits = np.int64((np.int64(1) << k) - 1)
    count, at, last = np.int64(0), np.int64(0), np.int64(-1)
    for b in range(lambdas.size):
        begin = b * bucket_size
        end = min(x.size, begin + bucket_size)
        limit = _threshold(x[begin:end], density, acc)
        lambdas[b] = limit
        if not limit > 0:
            continue
        low, high = bucket_key(stream, b)
        for i in range(begin, end, _CHUNK):
            run = x[i : min(end, i + _CHUNK)]
            _mark(run, limit, counter_of(i - begin, low), high, marks)
            marks[run.size :] = np.uint8(0)
            for octet in range((run.size + 7) // 8):
                if octets[octet] == 0:
                    continue
                for j in range(8 * octet, 8 * octet + 8):
                    mark = marks[j]
                    if mark == 0:
                        continue
                    index = np.int64(i + j)
                    gap = index - last - 1
                    last = index
                    at += gap >> k
                    head = np.int64(1) | ((gap & low_bits) << 1)
                    if mark == 2:
                        put_bits(words, _LOG, at, head | (np.int64(1) << (k + 1)), k + 2)
                        at += k + 2
                        exact[count] = run[j]
                        count += 1
                    else:
                        negative = np.int64(1) if run[j] < 0 else np.int64(0)
                        put_bits(words, _LOG, at, head | (negative << (k + 2)), k + 3)
                        at += k + 3
    return count, at


@jit
def add(lambdas, exact, words, bucket_size, k, out):
    """Add a payload's values to ``out``; return whether its stream is readable.

    Only ``out`` is written, whatever the stream holds.
    """
    for b in range((out.size + bucket_size - 1) // bucket_size):
        if np.isnan(lambdas[b]):
            out[b * bucket_size : min(out.size, (b + 1) * bucket_size)] = _NAN
    bits = np.int64(words.size * _WORD)
    at, index, used = np.int64(0), np.int64(-1), np.int64(0)
    while True:
        one = next_one(words, at)
        if one >= bits:
            return used == exact.size
        if one + k + 2 > bits or one - at > out.size >> k:
            return False
        fields = bits_at(words, _LOG, one + 1, k + 1)
        index += ((one - at) << k) + (fields & ((np.int64(1) << k) - 1)) + 1
        full = fields >> k == 1
        at = one + k + 2 if full else one + k + 3
        if at > bits or index >= out.size:
            return False
        if full:
            if used == exact.size:
                return False
            out[index] += exact[used]
            used += 1
        else:
            limit = lambdas[index // bucket_size]
            out[index] += -limit if bits_at(words, _LOG, at - 1, 1) == 1 else limit
