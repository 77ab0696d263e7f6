"""Rotate, quantise and pack (EDEN) in Numba, and invert it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch

from hvd_adaptive.base.device import HOST
from hvd_adaptive.kernels.eden import Buckets, Levels, shared_streams
from hvd_adaptive.kernels.numba.eden_decoder import decoder_of
from hvd_adaptive.kernels.numba.eden_encoder import encoder_of
from hvd_adaptive.kernels.numba.rotation import factors_of
from hvd_adaptive.kernels.packing import check_sections, packing_of


def encode(
    flat: torch.Tensor,
    scales: torch.Tensor,
    words: torch.Tensor,
    bucket_size: int,
    levels: Levels,
    shared: int,
    own: int,
) -> None:
    last = Buckets(flat.numel(), bucket_size).last
    streams = [*shared_streams(shared, levels.bits), own]
    encoder_of(levels.bits)(
        flat.numpy(),
        scales.numpy(),
        words.numpy().view(np.uint32),
        bucket_size,
        last,
        (levels.kept(bucket_size), levels.kept(last)),
        *_positive(levels),
        np.array(streams, dtype=np.uint64),
        factors_of(bucket_size, last, len(streams)),
    )


@functools.lru_cache(maxsize=64)
def _positive(levels: Levels) -> tuple[np.ndarray, np.ndarray]:
    """Return positive thresholds, then infinity, and positive levels, then 0: float32 (>= 8,)."""
    count = 1 << (levels.bits - 1)
    thresholds = np.full(max(8, count), np.inf, dtype=np.float32)
    sizes = np.zeros(max(8, count), dtype=np.float32)
    thresholds[: count - 1], sizes[:count] = levels.thresholds[count:], levels.values[count:]
    return thresholds, sizes


def decode_add(
    payloads: Sequence[tuple[torch.Tensor, torch.Tensor]],
    bucket_size: int,
    levels: Levels,
    shared: int,
    owns: Sequence[int],
    out: torch.Tensor,
) -> None:
    buckets = Buckets(out.numel(), bucket_size)
    codes = levels.codes(buckets.codes, bucket_size)
    count = packing_of(1 << levels.bits).words(codes)
    check_sections(payloads, "buckets", buckets.count, count)
    decoder_of(levels.bits)(
        np.array([scales.data_ptr() for scales, _ in payloads], dtype=np.int64),
        np.array([words.data_ptr() for _, words in payloads], dtype=np.int64),
        count,
        bucket_size,
        buckets.last,
        (levels.kept(bucket_size), levels.kept(buckets.last)),
        levels.values,
        np.array(shared_streams(shared, levels.bits), dtype=np.uint64),
        np.array(owns, dtype=np.uint64),
        factors_of(bucket_size, buckets.last, 1),
        out.numpy(),
    )


def warm(levels: Levels) -> None:
    """Compile the kernels of these levels into Numba's cache."""
    flat, size = torch.linspace(-1, 1, 600, **HOST), 64
    buckets = Buckets(flat.numel(), size)
    scales = torch.empty(buckets.count, **HOST)
    words = packing_of(1 << levels.bits).words(buckets.codes)
    packed = torch.empty(words, dtype=torch.int32, device="cpu")
    encode(flat, scales, packed, size, levels, 0, 1)
    decode_add([(scales, packed)], size, levels, 0, [1], torch.zeros(600, **HOST))
