"""Compute the integers of kernels/random.py in Numba."""

from __future__ import annotations

import numpy as np

from hvd_adaptive.kernels import random
from hvd_adaptive.kernels.numba.jit import inline

_GOLDEN64 = np.uint64(random.GOLDEN64)
_MIX64_A, _MIX64_B = np.uint64(random.MIX64_A), np.uint64(random.MIX64_B)
_MIX32_A, _MIX32_B = np.uint32(random.MIX32_A), np.uint32(random.MIX32_B)
_COUNTER = np.uint32(random.COUNTER)
_LOW = np.uint64(0xFFFFFFFF)
# j * COUNTER for each coordinate j of a chunk: loading it beats multiplying.
STEPS = (np.arange(1024, dtype=np.uint64) * random.COUNTER).astype(np.uint32)


@inline
def bucket_key(stream, bucket):
    """Return the low and high halves (uint32) of a bucket's key."""
    key = stream + np.uint64(np.uint64(bucket + 1) * _GOLDEN64)
    key = np.uint64((key ^ (key >> np.uint64(30))) * _MIX64_A)
    key = np.uint64((key ^ (key >> np.uint64(27))) * _MIX64_B)
    key = np.uint64(key ^ (key >> np.uint64(31)))
    return np.uint32(key & _LOW), np.uint32(key >> np.uint64(32))


@inline
def counter_of(place, low):
    """Return the counter of a coordinate at a place of its bucket; STEPS leads on from there."""
    return np.uint32(np.uint32(np.uint32(place) * _COUNTER) + low)


@inline
def mixed(counter, high):
    """Mix 32 bits from a counter and the high half of a key."""
    h = np.uint32(np.uint32(counter ^ np.uint32(counter >> np.uint32(16))) * _MIX32_A)
    h = np.uint32(h + high)
    return np.uint32(np.uint32(h ^ np.uint32(h >> np.uint32(13))) * _MIX32_B)


@inline
def uniform24(counter, high):
    """Return the upper 24 of the mixed bits, a float32."""
    return np.float32(np.int32(np.uint32(mixed(counter, high) >> np.uint32(8))))
