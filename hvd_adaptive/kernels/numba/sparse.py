"""Sparsify at random in Numba, bucket by bucket.

Signatures and numbers are the same as in reference/sparse.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hvd_adaptive.base.device import HOST
from hvd_adaptive.kernels import random
from hvd_adaptive.kernels.constants import NORM_LANES, SMALLEST_NORM
from hvd_adaptive.kernels.numba.encoder import bucket_key
from hvd_adaptive.kernels.numba.jit import inline, jit
from hvd_adaptive.kernels.numba.quantize import uniform24
from hvd_adaptive.kernels.numba.scan import add_lanes, largest_bits
from hvd_adaptive.kernels.rice import most_words
from hvd_adaptive.kernels.sparse import Sections, sections_of, unreadable, write_body
from hvd_adaptive.kernels.tables import UNIFORM_SCALE

_CHUNK = 512
_COUNTER = np.uint32(random.COUNTER)
_LOW = np.uint64(0xFFFFFFFF)
_SMALLEST = np.float32(SMALLEST_NORM)
_SCALE, _HALF_SCALE = UNIFORM_SCALE, np.float32(UNIFORM_SCALE / 2)
_ZERO, _INF, _NAN = np.float32(0), np.float32(np.inf), np.float32(np.nan)
_INFINITE = np.uint32(0x7F800000)
_WORD = 32


def encode_body(
    flat: torch.Tensor, bucket_size: int, density: float, k: int, key: int, body: torch.Tensor
) -> int:
    """See reference.sparse.encode_body."""
    if not flat.numel():
        body.zero_()
        return body.numel()
    return write_body(encode(flat, bucket_size, density, k, key), body)


def add_bodies(bodies: Sequence[torch.Tensor], bucket_size: int, k: int, out: torch.Tensor) -> None:
    """See reference.sparse.add_bodies."""
    for body in bodies:
        if not add(sections_of(body, out.numel(), bucket_size), bucket_size, k, out):
            raise unreadable(out.numel())


def encode(flat: torch.Tensor, bucket_size: int, density: float, k: int, key: int) -> Sections:
    """See reference.sparse.encode."""
    n = flat.numel()
    lambdas = np.empty(-(-n // bucket_size), np.float32)
    # Pages of these arrays that are never written take no memory.
    exact, words = np.empty(n, np.float32), np.zeros(most_words(n, k), np.uint32)
    count, bits = _encode(
        flat.numpy(), bucket_size, density, np.int64(k), np.uint64(key), lambdas, exact, words
    )
    used = words[: -(-bits // _WORD)].view(np.int32)
    return torch.from_numpy(lambdas), torch.from_numpy(exact[:count]), torch.from_numpy(used)


def add(sections: Sections, bucket_size: int, k: int, out: torch.Tensor) -> bool:
    """See reference.sparse.add."""
    lambdas, exact, words = sections
    if lambdas.numel() * bucket_size < out.numel():
        raise ValueError(f"payload of {lambdas.numel()} thresholds is too short")
    unsigned = words.numpy().view(np.uint32)
    return _add(lambdas.numpy(), exact.numpy(), unsigned, bucket_size, np.int64(k), out.numpy())


def warm() -> None:
    """Compile every kernel here into Numba's cache."""
    add(
        encode(torch.linspace(-1, 1, 100, **HOST), 100, 0.1, 3, 0), 100, 3, torch.zeros(100, **HOST)
    )


@inline
def _size(v):
    size = np.abs(v)
    return _ZERO if size < _SMALLEST else size


@inline
def _below(v, limit):
    size = _size(v)
    return np.float64(size) if size < limit else np.float64(0)


@inline
def _sum_below(x, limit, acc):
    """Sum the sizes below ``limit``: lane l adds its own in order, then a tree adds the lanes."""
    acc[:] = np.float64(0)
    quads = x.size // (4 * NORM_LANES)
    for quad in range(quads):
        part = x[quad * 4 * NORM_LANES : (quad + 1) * 4 * NORM_LANES]
        for lane in range(NORM_LANES):
            a, b = _below(part[lane], limit), _below(part[lane + NORM_LANES], limit)
            c = _below(part[lane + 2 * NORM_LANES], limit)
            d = _below(part[lane + 3 * NORM_LANES], limit)
            acc[lane] = (((acc[lane] + a) + b) + c) + d
    for i in range(quads * 4 * NORM_LANES, x.size):
        acc[i % NORM_LANES] += _below(x[i], limit)
    return add_lanes(acc)


@inline
def _count_from(x, limit):
    count = np.int32(0)
    for i in range(x.size):
        count += np.int32(_size(x[i]) >= limit)
    return np.int64(count)


@inline
def _threshold(x, density, acc):
    wanted = density * x.size
    if largest_bits(x) >= _INFINITE:
        return _NAN
    rest, exact = _sum_below(x, _INF, acc), np.int64(0)
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
        rest = _sum_below(x, limit, acc)
        if exact <= before or rest == 0 or exact >= wanted:
            return limit


@inline
def _mark(x, limit, steps, offset, high, marks):
    """Mark coordinates: 0 if dropped, 1 if rounded to plus or minus ``limit``, 2 if exact."""
    for j in range(x.size):
        size = _size(x[j])
        u = uniform24(np.uint32(steps[j] + offset), high)
        kept = np.uint8(np.float32(size / limit) > np.float32(u * _SCALE) + _HALF_SCALE)
        kept = np.uint8(0) if size == _ZERO else kept
        marks[j] = np.uint8(2) if size >= limit else kept


@inline
def _put(words, at, value, width):
    """Put ``value``, of ``width`` <= 32 bits, at bit ``at`` of words that are still zero there."""
    word, shift = at // _WORD, at % _WORD
    wide = np.uint64(np.uint64(value) << np.uint64(shift))
    words[word] |= np.uint32(wide & _LOW)
    if shift + width > _WORD:
        words[word + 1] |= np.uint32(wide >> np.uint64(32))


@jit
def _encode(x, bucket_size, density, k, stream, lambdas, exact, words):
    acc = np.empty(NORM_LANES, np.float64)
    steps = np.empty(_CHUNK, np.uint32)
    for j in range(_CHUNK):
        steps[j] = np.uint32(np.uint32(j) * _COUNTER)
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
        key = bucket_key(stream, b)
        low, high = np.uint32(key & _LOW), np.uint32(key >> np.uint64(32))
        for i in range(begin, end, _CHUNK):
            run = x[i : min(end, i + _CHUNK)]
            offset = np.uint32(np.uint32(np.uint32(i - begin) * _COUNTER) + low)
            _mark(run, limit, steps, offset, high, marks)
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
                        _put(words, at, head | (np.int64(1) << (k + 1)), k + 2)
                        at += k + 2
                        exact[count] = run[j]
                        count += 1
                    else:
                        negative = np.int64(1) if run[j] < 0 else np.int64(0)
                        _put(words, at, head | (negative << (k + 2)), k + 3)
                        at += k + 3
    return count, at


@inline
def _next_one(words, at):
    """Return the place of the first 1 at or after bit ``at``, or the stream's length."""
    word = at // _WORD
    if word >= words.size:
        return np.int64(words.size * _WORD)
    rest = np.uint32(words[word] >> np.uint32(at % _WORD))
    if rest == 0:
        word += 1
        while word < words.size and words[word] == 0:
            word += 1
        if word >= words.size:
            return np.int64(words.size * _WORD)
        at = np.int64(word * _WORD)
        rest = words[word]
    while rest & np.uint32(1) == 0:
        rest = np.uint32(rest >> np.uint32(1))
        at += 1
    return np.int64(at)


@inline
def _get(words, at, width):
    """Return ``width`` <= 32 bits from bit ``at``; the caller guarantees that they exist."""
    word, shift = at // _WORD, at % _WORD
    value = np.uint64(words[word])
    if shift + width > _WORD:
        value |= np.uint64(words[word + 1]) << np.uint64(32)
    value = np.uint64(value >> np.uint64(shift))
    return np.int64(value & np.uint64((np.uint64(1) << np.uint64(width)) - np.uint64(1)))


@jit
def _add(lambdas, exact, words, bucket_size, k, out):
    for b in range((out.size + bucket_size - 1) // bucket_size):
        if np.isnan(lambdas[b]):
            out[b * bucket_size : min(out.size, (b + 1) * bucket_size)] = _NAN
    bits = np.int64(words.size * _WORD)
    at, index, used = np.int64(0), np.int64(-1), np.int64(0)
    while True:
        one = _next_one(words, at)
        if one >= bits:
            return used == exact.size
        if one + k + 2 > bits or one - at > out.size >> k:
            return False
        fields = _get(words, one + 1, k + 1)
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
            out[index] += -limit if _get(words, at - 1, 1) == 1 else limit
