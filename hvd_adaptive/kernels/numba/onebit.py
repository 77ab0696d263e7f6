"""Encode 1-bit SGD in Numba, means and signs in one trip to memory; numba/bucket.py decodes."""

from __future__ import annotations

import numpy as np
import torch

from hvd_adaptive.kernels.constants import NORM_LANES
from hvd_adaptive.kernels.numba.codes import store_fixed
from hvd_adaptive.kernels.numba.jit import inline, jit
from hvd_adaptive.kernels.numba.scan import add_lanes
from hvd_adaptive.kernels.packing import BLOCK, LANES

_ZERO = np.float64(0)
_NAN = np.float32(np.nan)


def encode(flat: torch.Tensor, means: torch.Tensor, words: torch.Tensor, bucket_size: int) -> None:
    _encode(flat.numpy(), means.numpy(), words.numpy().view(np.uint32), bucket_size)


@inline
def _below(v):
    return np.float64(v) if v < 0 else _ZERO


@inline
def _above(v):
    return _ZERO if v < 0 else np.float64(v)


@inline
def _side_means(x, low, high, means):
    """Compute means of sides: lane l adds x[l], x[l + 32], ... in order, a tree adds the lanes."""
    low[:], high[:] = _ZERO, _ZERO
    negative = np.int32(0)
    quads = x.size // (4 * NORM_LANES)
    for quad in range(quads):
        part = x[quad * 4 * NORM_LANES : (quad + 1) * 4 * NORM_LANES]
        for lane in range(NORM_LANES):
            a, b = part[lane], part[lane + NORM_LANES]
            c, d = part[lane + 2 * NORM_LANES], part[lane + 3 * NORM_LANES]
            low[lane] = (((low[lane] + _below(a)) + _below(b)) + _below(c)) + _below(d)
            high[lane] = (((high[lane] + _above(a)) + _above(b)) + _above(c)) + _above(d)
    for i in range(quads * 4 * NORM_LANES, x.size):
        low[i % NORM_LANES] += _below(x[i])
        high[i % NORM_LANES] += _above(x[i])
    for i in range(x.size):
        negative += np.int32(x[i] < 0)
    below, above = add_lanes(low), add_lanes(high)
    if np.isfinite(below + above):
        means[0] = below / max(negative, np.int32(1))
        means[1] = above / max(np.int32(x.size) - negative, np.int32(1))
    else:
        means[:] = _NAN


@jit
def _encode(x, means, words, bucket_size):
    codes, units = np.empty(BLOCK, np.uint32), np.empty(LANES, np.uint32)
    low, high = np.empty(NORM_LANES, np.float64), np.empty(NORM_LANES, np.float64)
    for b in range(means.shape[0]):
        begin = b * bucket_size
        end = min(x.size, begin + bucket_size)
        _side_means(x[begin:end], low, high, means[b])
        i = begin
        while i < end:
            at = i % BLOCK
            stop = min(end, i - at + BLOCK)
            run, part = x[i:stop], codes[at : at + stop - i]
            for j in range(run.size):
                part[j] = np.uint32(0) if run[j] < 0 else np.uint32(1)
            if stop % BLOCK == 0 or stop == x.size:
                index = (stop - 1) // BLOCK
                store_fixed(codes, index, stop - index * BLOCK, 1, units, words)
            i = stop
