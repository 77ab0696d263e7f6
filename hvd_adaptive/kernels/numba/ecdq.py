"""Quantise with dither in Numba, chunk by chunk.

Functions and integers are the same as in reference/ecdq.py.
"""

from __future__ import annotations

import numpy as np
import torch

from hvd_adaptive.base.device import HOST
from hvd_adaptive.kernels import random
from hvd_adaptive.kernels.constants import SMALLEST_NORM
from hvd_adaptive.kernels.dithered import HALF, step_factors
from hvd_adaptive.kernels.numba import scan
from hvd_adaptive.kernels.numba.encoder import bucket_key
from hvd_adaptive.kernels.numba.jit import inline, jit
from hvd_adaptive.kernels.numba.quantize import uniform24

_CHUNK = 512
_COUNTER = np.uint32(random.COUNTER)
_LOW = np.uint64(0xFFFFFFFF)
_SMALLEST = np.float32(SMALLEST_NORM)
_HALF, _PER_CLASS = np.float32(HALF), np.float32(1 / HALF)
_SCALE, _MIDDLE = np.float32(2.0**-24), np.float32(0.5)
_ZERO, _ONE, _NAN = np.float32(0), np.float32(1), np.float32(np.nan)
_STEPS = (np.arange(_CHUNK, dtype=np.uint64) * random.COUNTER).astype(np.uint32)
# The counters of a chunk's symbols in the classes share one register, 16 bits each: counters in
# memory would wait for each other.
_ZERO64, _NEXT, _FOUR, _LANE = np.uint64(0), np.uint64(1), np.uint64(4), np.uint64(0xFFFF)
_MOST_SHIFT = 28  # of the last of a number's bytes


def bucket_steps(flat: torch.Tensor, bucket_size: int, delta: float) -> torch.Tensor:
    """See reference.ecdq.bucket_steps."""
    steps = scan.bucket_norms(flat.numpy(), bucket_size, False)
    whole, last = step_factors(flat.numel(), bucket_size, delta)
    with np.errstate(over="ignore"):
        steps[:-1] *= whole
        steps[-1:] *= last
    steps[steps < _SMALLEST] = 0
    steps[~np.isfinite(steps)] = np.nan
    return torch.from_numpy(steps)


def quantize(flat: torch.Tensor, steps: torch.Tensor, bucket_size: int, key: int) -> torch.Tensor:
    """See reference.ecdq.quantize."""
    q = torch.empty(flat.numel(), dtype=torch.int32, device="cpu")
    _quantize(flat.numpy(), steps.numpy(), bucket_size, np.uint64(key), q.numpy())
    return q


def add(
    q: torch.Tensor, steps: torch.Tensor, bucket_size: int, key: int, out: torch.Tensor
) -> None:
    """See reference.ecdq.add."""
    _add(q.numpy(), steps.numpy(), bucket_size, np.uint64(key), out.numpy())


class Splitter:
    """Quantise and run reference.ecdq.split in one pass, with reused buffers.

    size: the most coordinates of a segment. dtype: of symbols, np.uint8 or np.uint16.
    """

    def __init__(self, size: int, classes: int, most: int, dtype: type) -> None:
        self.most = most
        self._runs = np.empty((classes, size), dtype)
        self._escaped = np.empty(size, np.int32)

    def __call__(
        self,
        flat: torch.Tensor,
        steps: torch.Tensor,
        bucket_size: int,
        key: int,
        begin: int,
        end: int,
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Return runs of symbols and escaped integers (int32), valid until the next call."""
        starts = _starts(self._runs)
        ends = starts.copy()
        count = _split(
            flat.numpy(),
            steps.numpy(),
            bucket_size,
            np.uint64(key),
            begin,
            end,
            np.int32(self.most),
            self._runs.reshape(-1),
            ends,
            self._escaped,
        )
        runs = [row[:n] for row, n in zip(self._runs, (ends - starts).tolist(), strict=True)]
        return runs, self._escaped[:count]


def put_numbers(values: np.ndarray, most: int) -> np.ndarray:
    """Convert escaped integers (int32) to bytes (uint8): see reference.ecdq.split."""
    out = np.empty(5 * values.size, np.uint8)
    return out[: _put_numbers(values, np.int64(most), out)]


def numbers(data: np.ndarray, most: int) -> np.ndarray | None:
    """Invert ``put_numbers``; return None if it cannot have made the bytes."""
    values = np.empty(data.size, np.int32)
    count = _numbers(data, np.int64(most), values)
    return None if count < 0 else values[:count]


def counts(
    steps: torch.Tensor, bucket_size: int, key: int, begin: int, end: int, classes: int
) -> np.ndarray:
    """See reference.ecdq.counts."""
    found = np.zeros(classes, np.int64)
    _counts(steps.numpy(), bucket_size, np.uint64(key), begin, end, found)
    return found


def add_runs(
    runs: np.ndarray,
    escaped: np.ndarray,
    steps: torch.Tensor,
    bucket_size: int,
    key: int,
    begin: int,
    end: int,
    most: int,
    out: torch.Tensor,
) -> bool:
    """Run reference.ecdq.joined and add in one pass; return whether the escapes fit the runs.

    runs: uint8 or uint16 (classes, ...); each row begins with as many symbols as ``counts`` gives.
    """
    return _add_runs(
        runs.reshape(-1),
        _starts(runs),
        escaped,
        steps.numpy(),
        bucket_size,
        np.uint64(key),
        begin,
        end,
        np.int32(most),
        out.numpy(),
    )


def _starts(runs: np.ndarray) -> np.ndarray:
    return np.arange(len(runs), dtype=np.uint64) * np.uint64(runs.shape[1])


def warm() -> None:
    """Compile every kernel here into Numba's cache."""
    flat = torch.linspace(-1, 1, 100, **HOST)
    steps = bucket_steps(flat, 100, 1.0)
    add(quantize(flat, steps, 100, 0), steps, 100, 0, torch.zeros(100, **HOST))
    for dtype in (np.uint8, np.uint16):
        _, escaped = Splitter(100, 4, 1, dtype)(flat, steps, 100, 0, 0, 100)
        runs = np.ones((4, int(counts(steps, 100, 0, 0, 100, 4).max())), dtype)
        escaped = numbers(put_numbers(escaped, 1), 1)
        add_runs(runs, escaped, steps, 100, 0, 0, 100, 1, torch.zeros(100, **HOST))


@inline
def _quantized(run, inverse, offset, high, per, q, group):
    """Compute integers and classes of a run of one bucket."""
    for j in range(run.size):
        k = uniform24(np.uint32(_STEPS[j] + offset), high)
        negative = k >= _HALF
        m = k - _HALF if negative else k
        v = -run[j] if negative else run[j]
        y = np.float32(v * inverse) + np.float32((m + _MIDDLE) * _SCALE)
        q[j] = np.int32(np.rint(y))
        group[j] = np.int32(m * per)


@inline
def _bucket_keys(stream, bucket):
    key = bucket_key(stream, bucket)
    return np.uint32(key & _LOW), np.uint32(key >> np.uint64(32))


@inline
def _added(q, step, offset, high, out):
    """Add the decoded integers of a run of one bucket."""
    for j in range(out.size):
        k = uniform24(np.uint32(_STEPS[j] + offset), high)
        negative = k >= _HALF
        m = k - _HALF if negative else k
        value = np.float32(np.float32(q[j]) - np.float32((m + _MIDDLE) * _SCALE)) * step
        out[j] += -value if negative else value


@inline
def _move(at, filled):
    for c in range(at.size):
        at[c] += np.uint64(np.uint64(filled >> np.uint64(16 * c)) & _LANE)


@jit
def _quantize(x, steps, bucket_size, stream, q):
    group = np.empty(_CHUNK, np.int32)
    for b in range(steps.size):
        begin, end = b * bucket_size, min(x.size, (b + 1) * bucket_size)
        if not steps[b] > 0:
            q[begin:end] = 0
            continue
        low, high = _bucket_keys(stream, b)
        for i in range(begin, end, _CHUNK):
            stop = min(end, i + _CHUNK)
            offset = np.uint32(np.uint32(np.uint32(i - begin) * _COUNTER) + low)
            _quantized(x[i:stop], _ONE / steps[b], offset, high, _PER_CLASS, q[i:stop], group)


@jit
def _add(q, steps, bucket_size, stream, out):
    for b in range(steps.size):
        begin, end = b * bucket_size, min(out.size, (b + 1) * bucket_size)
        if np.isnan(steps[b]):
            out[begin:end] += _NAN
        if not steps[b] > 0:
            continue
        low, high = _bucket_keys(stream, b)
        for i in range(begin, end, _CHUNK):
            stop = min(end, i + _CHUNK)
            offset = np.uint32(np.uint32(np.uint32(i - begin) * _COUNTER) + low)
            _added(q[i:stop], steps[b], offset, high, out[i:stop])


@jit
def _split(x, steps, bucket_size, stream, first, last, most, runs, at, escaped):
    q, group = np.empty(_CHUNK, np.int32), np.empty(_CHUNK, np.int32)
    symbols = np.empty(_CHUNK, runs.dtype)
    escape = np.uint32(2 * most + 1)
    per = np.float32(_PER_CLASS * np.float32(at.size))
    count, i = 0, first
    while i < last:
        b = i // bucket_size
        end = min(last, (b + 1) * bucket_size)
        if not steps[b] > 0:
            i = end
            continue
        low, high = _bucket_keys(stream, b)
        inverse = _ONE / steps[b]
        while i < end:
            stop = min(end, i + _CHUNK)
            offset = np.uint32(np.uint32(np.uint32(i - b * bucket_size) * _COUNTER) + low)
            _quantized(x[i:stop], inverse, offset, high, per, q, group)
            far = np.uint32(0)
            for j in range(stop - i):
                place = np.uint32(q[j] + most)  # beyond every symbol where q is below -most
                far = max(far, place)
                symbols[j] = min(place, escape)
            if at.size == 1:
                runs[at[0] : at[0] + np.uint64(stop - i)] = symbols[: stop - i]
                at[0] += np.uint64(stop - i)
            else:
                filled = _ZERO64
                for j in range(stop - i):
                    lane = np.uint64(np.uint64(group[j]) << _FOUR)
                    place = np.uint64(np.uint64(filled >> lane) & _LANE)
                    runs[at[np.uint64(group[j])] + place] = symbols[j]
                    filled = np.uint64(filled + np.uint64(_NEXT << lane))
                _move(at, filled)
            if far >= escape:
                for j in range(stop - i):
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
        b = i // bucket_size
        end = min(last, (b + 1) * bucket_size)
        if not steps[b] > 0:
            i = end
            continue
        found[0] += end - i
        if found.size == 1:
            i = end
            continue
        low, high = _bucket_keys(stream, b)
        while i < end:
            stop = min(end, i + _CHUNK)
            offset = np.uint32(np.uint32(np.uint32(i - b * bucket_size) * _COUNTER) + low)
            one, two, three = np.int32(0), np.int32(0), np.int32(0)
            for j in range(stop - i):
                k = uniform24(np.uint32(_STEPS[j] + offset), high)
                group = np.int32((k - _HALF if k >= _HALF else k) * per)
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
        b = i // bucket_size
        end = min(last, (b + 1) * bucket_size)
        step = steps[b]
        if not step > 0:
            if np.isnan(step):
                out[i:end] += _NAN
            i = end
            continue
        low, high = _bucket_keys(stream, b)
        while i < end:
            stop = min(end, i + _CHUNK)
            offset = np.uint32(np.uint32(np.uint32(i - b * bucket_size) * _COUNTER) + low)
            for j in range(stop - i):
                k = uniform24(np.uint32(_STEPS[j] + offset), high)
                negative = k >= _HALF
                m = k - _HALF if negative else k
                size[j] = np.float32((m + _MIDDLE) * _SCALE)
                sign[j] = -step if negative else step
                group[j] = np.int32(m * per)
            largest = np.int32(0)
            if at.size == 1:
                symbols[: stop - i] = runs[at[0] : at[0] + np.uint64(stop - i)]
                at[0] += np.uint64(stop - i)
            else:
                filled = _ZERO64
                for j in range(stop - i):
                    lane = np.uint64(np.uint64(group[j]) << _FOUR)
                    place = np.uint64(np.uint64(filled >> lane) & _LANE)
                    symbols[j] = runs[at[np.uint64(group[j])] + place]
                    filled = np.uint64(filled + np.uint64(_NEXT << lane))
                _move(at, filled)
            for j in range(stop - i):
                q[j] = np.int32(np.int32(symbols[j]) - most)
                largest = max(largest, q[j])
            if largest > most:
                for j in range(stop - i):
                    if q[j] > most:
                        if count == escaped.size:
                            return False
                        q[j] = escaped[count]
                        count += 1
            for j in range(stop - i):
                out[i + j] += np.float32(np.float32(q[j]) - size[j]) * sign[j]
            i = stop
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
