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


@jit
def _encode(x, means, words, bucket_size):
    codes, units = np.empty(BLOCK, np.uint32), np.empty(LANES, np.uint32)
    lanes = np.empty(NORM_LANES, np.float64)
    for b in range(means.shape[0]):
        begin = b * bucket_size
        end = min(x.size, begin + bucket_size)
        below = lane_sum(x[begin:end], _below, _ZERO, lanes)
        above = lane_sum(x[begin:end], _above, _ZERO, lanes)
        i, ones = begin, np.uint32(0)
        while i < end:
            at = i % BLOCK
            stop = min(end, i - at + BLOCK)
            run, part = x[i:stop], codes[at : at + stop - i]
            for j in range(run.size):
                part[j] = np.uint32(0) if run[j] < 0 else np.uint32(1)
                ones = np.uint32(ones + part[j])
            if stop % BLOCK == 0 or stop == x.size:
                index = (stop - 1) // BLOCK
                store_fixed(codes, index, stop - index * BLOCK, 1, units, words)
            i = stop
        if np.isfinite(below + above):
            means[b, 0] = below / max(end - begin - np.int64(ones), 1)
            means[b, 1] = above / max(np.int64(ones), 1)
        else:
            means[b, :] = _NAN
