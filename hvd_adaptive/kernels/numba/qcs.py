"""Sample compressively and quantise (QCS) in Numba, bucket by bucket in the L1 and L2 caches."""

from __future__ import annotations

import functools

import numpy as np
import torch

from hvd_adaptive.kernels import hadamard
from hvd_adaptive.kernels.constants import NORM_LANES, SMALLEST_NORM
from hvd_adaptive.kernels.numba.codes import pack, unpack
from hvd_adaptive.kernels.numba.hadamard import apply, fold, padded, repeat
from hvd_adaptive.kernels.numba.jit import inline, jit
from hvd_adaptive.kernels.numba.random import STEPS, bucket_key, counter_of, uniform24
from hvd_adaptive.kernels.numba.scan import norm_of
from hvd_adaptive.kernels.packing import packing_of
from hvd_adaptive.kernels.qcs import DITHER_OFFSET, NEGATIVE_FROM, streams

_CHUNK = 512
_OFFSET, _NEGATIVE_FROM = np.float32(DITHER_OFFSET), np.float32(NEGATIVE_FROM)
_SMALLEST = np.float32(SMALLEST_NORM)
_UNIT, _ZERO = np.float32(2.0**-24), np.float32(0)


def encode(flat, scales, words, runs, alphabet, key):
    codes = np.empty(sum(run.codes for run in runs), np.uint8)
    at = 0
    for run in runs:
        _encode_run(
            flat.numpy()[run.start : run.stop],
            scales.numpy()[run.first : run.first + run.buckets],
            codes[at : at + run.codes],
            run.order,
            run.rows,
            *_folded(run.order, run.rows, False),
            np.float32(alphabet / 2),
            np.float32(2 / (alphabet - 1)),
            np.float32(run.rows**-0.5),
            *map(np.uint64, streams(key, run)),
        )
        at += run.codes
    pack(torch.from_numpy(codes), packing_of(alphabet), words)


def decode_add(payloads, keys, runs, alphabet, factor, out):
    codes = np.empty(sum(run.codes for run in runs), np.uint8)
    for (scales, words), key in zip(payloads, keys, strict=True):
        unpack(words, packing_of(alphabet), torch.from_numpy(codes))
        at = 0
        for run in runs:
            _decode_run(
                codes[at : at + run.codes],
                scales.numpy()[run.first : run.first + run.buckets],
                run.order,
                run.rows,
                *_folded(run.order, run.rows, True),
                np.float32((alphabet - 1) / 2),
                np.float32(run.weight * run.rows**-0.5),
                *map(np.uint64, streams(key, run)),
                out.numpy()[run.start : run.stop],
            )
            at += run.codes
    if factor != 1.0:
        out *= factor


@functools.cache
def _folded(order: int, rows: int, transposed: bool) -> tuple[int, np.ndarray]:
    """Return the length of the folded buffer, and the base as the transform reads it."""
    base = hadamard.base(hadamard.base_order(order))
    return hadamard.kept(order, rows), padded(base.T if transposed else base)


@inline
def _drawn(x, y, stream, bucket, term, a, b):
    """Set y to term(x, y, k, a, b) of each coordinate and its random integer k; x repeats if it is
    shorter.
    """
    low, high = bucket_key(stream, bucket)
    for begin in range(0, y.size, _CHUNK):
        target, at = y[begin : begin + _CHUNK], begin % x.size
        part = x[at : at + target.size]
        offset = counter_of(begin, low)
        for j in range(target.size):
            k = uniform24(np.uint32(STEPS[j] + offset), high)
            target[j] = term(part[j], target[j], k, a, b)


@inline
def _flipped(v, _before, k, _a, _b):
    """Give v the coordinate's sign."""
    return -v if k >= _NEGATIVE_FROM else v


@inline
def _quantized(w, _before, k, inverse, half_alphabet):
    t = (w * inverse + (k * _UNIT - _OFFSET)) + half_alphabet
    top = np.int32(np.int32(np.float32(2) * half_alphabet) - 1)
    return np.uint8(min(max(np.int32(t), np.int32(0)), top))


@inline
def _dequantized(code, _before, k, half, _b):
    """Return v̂/ς."""
    return (np.float32(code) - half) - (k * _UNIT - _OFFSET)


@inline
def _added(v, before, k, factor, _b):
    """Add v * factor with the coordinate's sign."""
    return before + (-v if k >= _NEGATIVE_FROM else v) * factor


@jit
def _encode_run(
    x, scales, codes, order, rows, size, columns, half_alphabet, per_norm, root, signs, dithers
):
    y, total = np.empty(order, np.float32), np.empty(columns.shape[1], np.float32)
    acc = np.empty(NORM_LANES, np.float32)
    for bucket in range(scales.size):
        own = x[bucket * order : min(x.size, (bucket + 1) * order)]
        _drawn(own, y[: own.size], signs, bucket, _flipped, _ZERO, _ZERO)
        y[own.size :] = np.float32(0)
        fold(y, size)
        apply(y[:size], columns, total)
        step = norm_of(y[:rows], True, acc) * per_norm
        scale = step * root
        target = codes[bucket * rows : (bucket + 1) * rows]
        if _SMALLEST <= scale < np.inf:
            inverse = np.float32(1) / step
            _drawn(y[:rows], target, dithers, bucket, _quantized, inverse, half_alphabet)
        else:
            scale = np.float32(0) if scale < _SMALLEST else np.float32(np.nan)
            target[:] = np.uint8(0)
        scales[bucket] = scale


@jit
def _decode_run(codes, scales, order, rows, size, columns, half, weight, signs, dithers, out):
    repeated = max(size, min(order, _CHUNK))
    y, total = np.empty(repeated, np.float32), np.empty(columns.shape[1], np.float32)
    for bucket in range(scales.size):
        scale = scales[bucket]
        if scale == 0:
            continue
        own = codes[bucket * rows : (bucket + 1) * rows]
        _drawn(own, y[:rows], dithers, bucket, _dequantized, half, _ZERO)
        y[rows:size] = np.float32(0)
        apply(y[:size], columns, total)
        repeat(y, size)
        target = out[bucket * order : min(out.size, (bucket + 1) * order)]
        _drawn(y, target, signs, bucket, _added, scale * weight, _ZERO)
