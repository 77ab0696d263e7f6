"""Encode 1-bit SGD in Numba, means and signs in one trip to memory; numba/bucket.py decodes."""

from __future__ import annotations

import numpy as np

from hvd_adaptive.kernels.constants import NORM_LANES
from hvd_adaptive.kernels.numba.codes import store_fixed
from hvd_adaptive.kernels.numba.jit import inline, jit
from hvd_adaptive.kernels.numba.scan import lane_sum
from hvd_adaptive.kernels.packing import BLOCK, LANES

_ZERO = np.float32(0)
_NAN = np.float32(np.nan)


def encode(flat, means, words, bucket_size):
    _encode(flat.numpy(), means.numpy(), words.numpy().view(np.uint32), bucket_size)


@inline
def _below(v, at):
    return np.float64(v if v < at else np.float32(0))


@inline
def _above(v, at):
    return np.float64(np.float32(0) if v < at else v)


@inline
def _side_means(x, lanes, means):
    below, above = lane_sum(x, _below, _ZERO, lanes), lane_sum(x, _above, _ZERO, lanes)
    negative = np.int32(0)
    for i in range(x.size):
        negative += np.int32(x[i] < 0)
    if np.isfinite(below + above):
        means[0] = below / max(negative, np.int32(1))
        means[1] = above / max(np.int32(x.size) - negative, np.int32(1))
    else:
        means[:] = _NAN


@jit
def _encode(x, means, words, bucket_size):
    codes, units = np.empty(BLOCK, np.uint32), np.empty(LANES, np.uint32)
    lanes = np.empty(NORM_LANES, np.float64)
    for b in range(means.shape[0]):
        begin = b * bucket_size
        end = min(x.size, begin + bucket_size)
        _side_means(x[begin:end], lanes, means[b])
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
