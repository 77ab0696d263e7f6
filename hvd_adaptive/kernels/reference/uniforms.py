"""Draw the random integers of coordinates (kernels/random.py), in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_adaptive.base.tensors import from_host
from hvd_adaptive.kernels import random
from hvd_adaptive.kernels.constants import MASK32


def uniforms(coordinates: int, bucket_size: int, key: int, device: torch.device) -> torch.Tensor:
    """Return the integers below 2**24 (float32) that round ``coordinates`` coordinates."""
    j = torch.arange(bucket_size, dtype=torch.int64, device=device)
    h = mixed(key, range(-(-coordinates // bucket_size)), j)
    return (h >> 8).to(torch.float32).reshape(-1)[:coordinates]


def mixed(stream: int, buckets: Sequence[int], places: torch.Tensor) -> torch.Tensor:
    """Return 32-bit hashes (int64, (buckets, places)) of places (int64) in buckets of a stream."""
    keys = [random.bucket_key(stream, bucket) for bucket in buckets]
    low, high = from_host(
        torch.tensor(keys, dtype=torch.int64, device="cpu").view(len(keys), 2, 1), places.device
    ).unbind(1)
    h = ((places * random.COUNTER & MASK32) + low) & MASK32
    h = ((h ^ (h >> 16)) * random.MIX32_A) & MASK32
    h = (h + high) & MASK32
    return ((h ^ (h >> 13)) * random.MIX32_B) & MASK32
