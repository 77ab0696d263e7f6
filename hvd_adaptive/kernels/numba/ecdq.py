"""Quantise with dither in Numba, chunk by chunk. Arrays are NumPy's.

The dither of a coordinate comes from its integer k below 2**24 (reference/uniforms.py). The top bit
is the dither's sign. The other bits, m = k mod 2**23, give its size a = (m + 1/2)/2**24 in (0,
1/2), and the top bits of m give its class, one of 1, 2 or 4. A coordinate v in a bucket of step s
becomes q = round(±v/s + a), to even at halves, and is decoded as ±s (q - a).
"""

from __future__ import annotations

import numpy as np

from hvd_adaptive.kernels.constants import SMALLEST_NORM
from hvd_adaptive.kernels.numba import scan
from hvd_adaptive.kernels.numba.jit import inline, jit
from hvd_adaptive.kernels.numba.random import STEPS, bucket_key, counter_of, uniform24

_CHUNK = 512
_SMALLEST = np.float32(SMALLEST_NORM)
_HALF = np.float32(2**23)  # integers of one sign of the dither
_PER_CLASS = np.float32(1 / _HALF)
_SCALE, _MIDDLE = np.float32(2.0**-24), np.float32(0.5)
_ONE, _NAN = np.float32(1), np.float32(np.nan)
_MOST_SHIFT = 28  # of the last byte of an escaped integer
# The counters of a chunk's symbols in the classes share one register, 16 bits each: counters in
# memory would wait for each other.
_ZERO64, _NEXT, _FOUR, _LANE = np.uint64(0), np.uint64(1), np.uint64(4), np.uint64(0xFFFF)


def bucket_steps(flat, bucket_size, delta):
    """Return the steps of the buckets of ``flat`` (float32, (n,)), delta root mean squares each.

    A step is 0 for a zero bucket and if it falls below the normal range. It is NaN if the bucket,
    its norm or its step is not finite.
    """
    steps = scan.bucket_norms(flat, bucket_size, False)
    rest = max(1, flat.size - (steps.size - 1) * bucket_size)
    whole, last = (delta / np.sqrt([bucket_size, rest])).astype(np.float32)
    with np.errstate(over="ignore"):
        steps[:-1] *= whole
        steps[-1:] *= last
    steps[steps < _SMALLEST] = 0
    steps[~np.isfinite(steps)] = np.nan
    return steps


def quantize(flat, steps, bucket_size, key):
    """Return q (int32) of all coordinates; 0 in buckets without a step above 0."""
    q = np.empty(flat.size, np.int32)
    _quantize(flat, steps, bucket_size, np.uint64(key), q)
    return q


def add(q, steps, bucket_size, key, out):
    """Add the decoded values of ``q`` (int32) to ``out`` (float32); NaN if the step is NaN."""
    _add(q, steps, bucket_size, np.uint64(key), out)


def split(flat, where, most, runs, escaped):
    """Quantise a stretch of ``flat``; return each class's symbols, and the escaped integers, both
    in the order of the coordinates.

    Only coordinates in buckets with a step above 0 have symbols. The symbol of q is its place in
    -most..most; the next symbol is the escape.

    runs: room for the symbols, uint8 or uint16 (classes, the most coordinates of a stretch).
    escaped: room for the integers, int32.
    """
    starts = _starts(runs)
    ends = starts.copy()
    count = _split(flat, *where, np.int32(most), runs.reshape(-1), ends, escaped)
    sizes = (ends - starts).tolist()
    return [row[:size] for row, size in zip(runs, sizes, strict=True)], escaped[:count]


def counts(where, classes):
    """Return the number of symbols of each class, int64."""
    found = np.zeros(classes, np.int64)
    _counts(*where, found)
    return found


def add_runs(runs, escaped, where, most, out):
    """Add the values of a stretch of ``out``; return whether the escaped integers fit the runs.

    Each row of ``runs`` begins with as many symbols as ``counts`` gives.
    """
    return _add_runs(runs.reshape(-1), _starts(runs), escaped, *where, np.int32(most), out)


def put_numbers(values, most):
    """Convert escaped integers (int32) to bytes (uint8).

    They are numbered from the inside out, even numbers for positive ones, and stored as bytes of 7
    bits, lowest first; all bytes of a number but the last have the top bit set.
    """
    out = np.empty(5 * values.size, np.uint8)
    return out[: _put_numbers(values, np.int64(most), out)]


def numbers(data, most):
    """Invert ``put_numbers``; return None if a number is cut off, padded with zeros, or beyond 30
    bits.
    """
    values = np.empty(data.size, np.int32)
    count = _numbers(data, np.int64(most), values)
    return None if count < 0 else values[:count]


def _starts(runs: np.ndarray) -> np.ndarray:
    return np.arange(len(runs), dtype=np.uint64) * np.uint64(runs.shape[1])


@inline
def _dither(j, offset, high):
    """Return the sign and the size, m, of the dither of coordinate j of a chunk."""
    k = uniform24(np.uint32(STEPS[j] + offset), high)
    negative = k >= _HALF
    return negative, k - _HALF if negative else k


@inline
def _chunk(i, last, bucket_size, stream):
    """Return the bucket of coordinate i, the end of a chunk from there, its counter and key."""
    b = i // bucket_size
    low, high = bucket_key(stream, b)
    stop = min(last, (b + 1) * bucket_size, i + _CHUNK)
    return b, stop, counter_of(i - b * bucket_size, low), high


@inline
def _quantized(run, inverse, offset, high, per, q, group):
    """Compute integers and classes of a run of one bucket."""
    for j in range(run.size):
        negative, m = _dither(j, offset, high)
        v = -run[j] if negative else run[j]
        y = np.float32(v * inverse) + np.float32((m + _MIDDLE) * _SCALE)
        q[j] = np.int32(np.rint(y))
        group[j] = np.int32(m * per)


@jit
def _quantize(x, steps, bucket_size, stream, q):
    group, i = np.empty(_CHUNK, np.int32), 0
    while i < x.size:
        b, stop, offset, high = _chunk(i, x.size, bucket_size, stream)
        if steps[b] > 0:
            _quantized(x[i:stop], _ONE / steps[b], offset, high, _PER_CLASS, q[i:stop], group)
        else:
            q[i:stop] = 0
        i = stop


@jit
def _add(q, steps, bucket_size, stream, out):
    i = 0
    while i < out.size:
        b, stop, offset, high = _chunk(i, out.size, bucket_size, stream)
        step, part, target = steps[b], q[i:stop], out[i:stop]
        if np.isnan(step):
            target += _NAN
        elif step > 0:
            for j in range(target.size):
                negative, m = _dither(j, offset, high)
                value = np.float32(np.float32(part[j]) - np.float32((m + _MIDDLE) * _SCALE)) * step
                target[j] += -value if negative else value
        i = stop


@inline
def _placed(at, filled, group):
    """Return the place of a class's next symbol, and ``filled`` with it; see ``_move``."""
    lane = np.uint64(np.uint64(group) << _FOUR)
    place = at[np.uint64(group)] + np.uint64(np.uint64(filled >> lane) & _LANE)
    return place, np.uint64(filled + np.uint64(_NEXT << lane))


@inline
def _move(at, filled):
    for c in range(at.size):
        at[c] += np.uint64(np.uint64(filled >> np.uint64(16 * c)) & _LANE)


@jit
def _split(x, steps, bucket_size, stream, first, last, most, runs, at, escaped):
    q, group = np.empty(_CHUNK, np.int32), np.empty(_CHUNK, np.int32)
    symbols = np.empty(_CHUNK, runs.dtype)
    escape = np.uint32(2 * most + 1)
    per = np.float32(_PER_CLASS * np.float32(at.size))
    count, i = 0, first
    while i < last:
        b, stop, offset, high = _chunk(i, last, bucket_size, stream)
        if not steps[b] > 0:
            i = stop
            continue
        part = x[i:stop]
        _quantized(part, _ONE / steps[b], offset, high, per, q, group)
        far = np.uint32(0)
        for j in range(part.size):
            place = np.uint32(q[j] + most)  # beyond every symbol where q is below -most
            far = max(far, place)
            symbols[j] = min(place, escape)
        if at.size == 1:
            runs[at[0] : at[0] + np.uint64(part.size)] = symbols[: part.size]
            at[0] += np.uint64(part.size)
        else:
            filled = _ZERO64
            for j in range(part.size):
                place, filled = _placed(at, filled, group[j])
                runs[place] = symbols[j]
            _move(at, filled)
        if far >= escape:
            for j in range(part.size):
                if np.abs(q[j]) > most:
                    escaped[count] = q[j]
                    count += 1
        i = stop
    return count


@jit
def _counts(steps, bucket_size, stream, first, last, found):
    per = np.float32(_PER_CLASS * np.float32(found.size))
    i = first
    while i < last:
        b, stop, offset, high = _chunk(i, last, bucket_size, stream)
        if steps[b] > 0:
            found[0] += stop - i
        if steps[b] > 0 and found.size > 1:
            one, two, three = np.int32(0), np.int32(0), np.int32(0)
            for j in range(stop - i):
                _, m = _dither(j, offset, high)
                group = np.int32(m * per)
                one += np.int32(group == 1)
                two += np.int32(group == 2)
                three += np.int32(group == 3)
            found[0] -= one + two + three
            found[1] += one
            if found.size > 2:
                found[2] += two
                found[3] += three
        i = stop


@jit
def _add_runs(runs, at, escaped, steps, bucket_size, stream, first, last, most, out):
    q, group = np.empty(_CHUNK, np.int32), np.empty(_CHUNK, np.int32)
    symbols = np.empty(_CHUNK, runs.dtype)
    size, sign = np.empty(_CHUNK, np.float32), np.empty(_CHUNK, np.float32)
    per = np.float32(_PER_CLASS * np.float32(at.size))
    count, i = 0, first
    while i < last:
        b, stop, offset, high = _chunk(i, last, bucket_size, stream)
        step, target, i = steps[b], out[i:stop], stop
        if not step > 0:
            if np.isnan(step):
                target += _NAN
            continue
        for j in range(target.size):
            negative, m = _dither(j, offset, high)
            size[j] = np.float32((m + _MIDDLE) * _SCALE)
            sign[j] = -step if negative else step
            group[j] = np.int32(m * per)
        largest = np.int32(0)
        if at.size == 1:
            symbols[: target.size] = runs[at[0] : at[0] + np.uint64(target.size)]
            at[0] += np.uint64(target.size)
        else:
            filled = _ZERO64
            for j in range(target.size):
                place, filled = _placed(at, filled, group[j])
                symbols[j] = runs[place]
            _move(at, filled)
        for j in range(target.size):
            q[j] = np.int32(np.int32(symbols[j]) - most)
            largest = max(largest, q[j])
        if largest > most:
            for j in range(target.size):
                if q[j] > most:
                    if count == escaped.size:
                        return False
                    q[j] = escaped[count]
                    count += 1
        for j in range(target.size):
            target[j] += np.float32(np.float32(q[j]) - size[j]) * sign[j]
    return count == escaped.size


@jit
def _put_numbers(values, most, out):
    at = 0
    for value in values:
        wide = np.int64(value)
        rest = 2 * (abs(wide) - most - 1) + (1 if wide < 0 else 0)
        while rest > 127:
            out[at] = np.uint8((rest & 127) | 128)
            rest >>= 7
            at += 1
        out[at] = np.uint8(rest)
        at += 1
    return at


@jit
def _numbers(data, most, values):
    count, number, shift = 0, np.int64(0), 0
    for byte in data:
        if shift > _MOST_SHIFT or (byte == 0 and shift > 0):
            return -1
        number += np.int64(byte & 127) << shift
        shift += 7
        if number >= np.int64(1) << 31:
            return -1
        if byte < 128:
            size = (number >> 1) + most + 1
            values[count] = -size if number & 1 else size
            count += 1
            number, shift = np.int64(0), 0
    return -1 if shift else count
