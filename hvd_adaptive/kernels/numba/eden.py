"""Rotate, quantise and pack (EDEN) in Numba, and invert it.

Signatures and integers are the same as in reference/eden.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from hvd_adaptive.device import HOST
from hvd_adaptive.kernels.eden import Buckets, Levels, Sections, Widths, shared_streams
from hvd_adaptive.kernels.numba import eden_decoder, eden_encoder
from hvd_adaptive.kernels.numba.eden_decoder import decoder_of
from hvd_adaptive.kernels.numba.rotation import factors_of
from hvd_adaptive.kernels.packing import packing_of


def encode(
    flat: torch.Tensor,
    scales: torch.Tensor,
    words: torch.Tensor,
    bucket_size: int,
    levels: Levels,
    shared: int,
    own: int,
) -> None:
    """See reference.eden.encode."""
    numbers = np.arange(Buckets(flat.numel(), bucket_size).count)
    ends = np.zeros(levels.bits, dtype=np.int64)
    ends[-1] = numbers.size
    streams = [*shared_streams(shared, levels.bits), own]
    _encode(flat, numbers, ends, scales, words, bucket_size, _alone(levels), levels.kept, streams)


def encode_widths(
    flat: torch.Tensor,
    sections: Sections,
    scales: torch.Tensor,
    words: torch.Tensor,
    bucket_size: int,
    widths: Widths,
    streams: Sequence[int],
) -> None:
    """See reference.eden.encode_widths."""
    numbers, ends = sections.numbers, sections.ends
    _encode(flat, numbers, ends, scales, words, bucket_size, widths, int, streams)


def _encode(
    flat: torch.Tensor,
    numbers: np.ndarray,
    ends: np.ndarray,
    scales: torch.Tensor,
    words: torch.Tensor,
    bucket_size: int,
    widths: Widths,
    kept: Callable[[int], int],
    streams: Sequence[int],
) -> None:
    last = Buckets(flat.numel(), bucket_size).last
    eden_encoder.encode(
        flat.numpy(),
        numbers,
        ends,
        scales.numpy(),
        words.numpy().view(np.uint32),
        bucket_size,
        last,
        (kept(bucket_size), kept(last)),
        widths.positive,
        widths.sizes,
        np.array(streams, dtype=np.uint64),
        factors_of(bucket_size, last, len(streams)),
    )


@functools.lru_cache(maxsize=64)
def _alone(levels: Levels) -> Widths:
    return Widths({levels.bits: levels})


def decode_add(
    payloads: Sequence[tuple[torch.Tensor, torch.Tensor]],
    bucket_size: int,
    levels: Levels,
    shared: int,
    owns: Sequence[int],
    out: torch.Tensor,
) -> None:
    """See reference.eden.decode_add."""
    buckets = Buckets(out.numel(), bucket_size)
    codes = levels.codes(buckets.codes, bucket_size)
    count = packing_of(1 << levels.bits).words(codes)
    for scales, words in payloads:
        if scales.numel() < buckets.count or words.numel() < count:
            raise ValueError(
                f"payload of {scales.numel()} buckets and {words.numel()} words is too short"
            )
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


def add_widths(
    scales: torch.Tensor,
    words: torch.Tensor,
    sections: Sections,
    bucket_size: int,
    widths: Widths,
    own: int,
    sums: torch.Tensor,
) -> None:
    """See reference.eden.add_widths."""
    eden_decoder.add(
        scales.numpy(),
        words.numpy().view(np.uint32),
        sections.numbers,
        sections.ends,
        bucket_size,
        widths.values,
        np.uint64(own),
        factors_of(bucket_size, sums.numel() % bucket_size, 1),
        sums.numpy(),
    )


def add_sums(
    sums: torch.Tensor,
    used: np.ndarray,
    bucket_size: int,
    shared: Sequence[int],
    out: torch.Tensor,
) -> None:
    """See reference.eden.add_sums."""
    factors = factors_of(bucket_size, sums.numel() % bucket_size, 1)
    streams = np.array(shared, dtype=np.uint64)
    eden_decoder.add_sums(sums.numpy(), used, bucket_size, streams, factors, out.numpy())


def warm(levels: Levels) -> None:
    """Compile the kernels of these levels into Numba's cache."""
    flat, size = torch.linspace(-1, 1, 600, **HOST), 64
    buckets = Buckets(flat.numel(), size)
    scales = torch.empty(buckets.count, **HOST)
    words = packing_of(1 << levels.bits).words(buckets.codes)
    packed = torch.empty(words, dtype=torch.int32, device="cpu")
    encode(flat, scales, packed, size, levels, 0, 1)
    decode_add([(scales, packed)], size, levels, 0, [1], torch.zeros(600, **HOST))
    sums, used = torch.zeros(buckets.codes, **HOST), np.ones(buckets.count, dtype=np.int64)
    sections = Sections.of(used * levels.bits, buckets, levels.bits)
    add_widths(scales, packed, sections, size, _alone(levels), 1, sums)
    add_sums(sums, used > 0, size, [0, 1], torch.zeros(600, **HOST))
