"""Draw the random integers of coordinates (kernels/random.py), in plain torch."""

from __future__ import annotations

import torch

from hvd_adaptive.base.device import from_host
from hvd_adaptive.kernels import random
from hvd_adaptive.kernels.constants import MASK32


def uniforms(coordinates: int, bucket_size: int, key: int, device: torch.device) -> torch.Tensor:
    """Return the integers below 2**24 (float32) that round ``coordinates`` coordinates."""
    count = -(-coordinates // bucket_size)
    keys = [random.bucket_key(key, bucket) for bucket in range(count)]
    low, high = from_host(
        torch.tensor(keys, dtype=torch.int64, device="cpu").view(count, 2, 1), device
    ).unbind(1)
    j = torch.arange(bucket_size, dtype=torch.int64, device=device)
    h = ((j * random.COUNTER & MASK32) + low) & MASK32
    h = ((h ^ (h >> 16)) * random.MIX32_A) & MASK32
    h = (h + high) & MASK32
    h = ((h ^ (h >> 13)) * random.MIX32_B) & MASK32
    return (h >> 8).to(torch.float32).reshape(-1)[:coordinates]
