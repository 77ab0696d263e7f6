"""The kernels for CPU tensors, in Numba: one pass through L1-sized blocks, vectorised, no GIL.

Same signatures and the same integers as kernels/reference.py.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from hvd_adaptive.coding.fixed import packed_words
from hvd_adaptive.kernels import cpu_decode, cpu_encode, cpu_scan
from hvd_adaptive.kernels.tables import KernelTable

# The loops compare with this many thresholds; 7 and 8 bits search, and want one beyond the last.
_PADDED_THRESHOLDS = {1: 2, 2: 2, 3: 4, 4: 8, 5: 16, 6: 32, 7: 65, 8: 129}


def encode(
    flat: torch.Tensor,
    scales: torch.Tensor,
    words: torch.Tensor,
    bucket_size: int,
    norm: str,
    table: KernelTable,
    key: int,
) -> None:
    """See reference.encode."""
    start, gap, lower, codes = _padded(table)
    _encoder(table.bits)(
        flat.numpy(),
        scales.numpy(),
        words.numpy().view(np.uint32),
        bucket_size,
        norm == "linf",
        np.uint64(key),
        start,
        gap,
        lower,
        codes,
        table.search if table.bits > 6 else _NO_SEARCH,
        table.corrections if table.bits > 6 else 0,
        table.negative,
    )


def decode_add(
    payloads: list[tuple[torch.Tensor, torch.Tensor]],
    bucket_size: int,
    table: KernelTable,
    factor: float,
    out: torch.Tensor,
) -> None:
    """See reference.decode_add."""
    count = packed_words(out.numel(), table.bits)
    scales = np.array([s.data_ptr() for s, _ in payloads], dtype=np.int64)
    words = np.array([w.data_ptr() for _, w in payloads], dtype=np.int64)
    for s, w in payloads:
        if s.numel() * bucket_size < out.numel() or w.numel() < count:
            raise ValueError(f"payload of {s.numel()} scales and {w.numel()} words is too short")
    values = np.zeros(max(16, len(table.values)), np.float32)
    values[: len(table.values)] = table.values
    _decoder(table.bits)(scales, words, bucket_size, values, np.float32(factor), out.numpy())


def histogram(bucket: torch.Tensor, scale: float) -> np.ndarray:
    """See reference.histogram."""
    return cpu_scan.histogram(bucket.numpy(), np.float32(scale))


def clipped(flat: torch.Tensor, bucket_size: int, clip: float) -> torch.Tensor:
    """See reference.clipped."""
    return torch.from_numpy(cpu_scan.clipped(flat.numpy(), bucket_size, clip))


def bucket_norms(flat: torch.Tensor, bucket_size: int, norm: str) -> torch.Tensor:
    """See reference.bucket_norms."""
    return torch.from_numpy(cpu_scan.bucket_norms(flat.numpy(), bucket_size, norm == "linf"))


def checksum(words: torch.Tensor, seed: int) -> int:
    """See reference.checksum."""
    return int(cpu_scan.checksum(words.numpy().view(np.uint32), np.uint32(seed)))


_NO_SEARCH = np.zeros(1, np.uint32)
_encoder = functools.cache(cpu_encode.make_encoder)
_decoder = functools.cache(cpu_decode.make_decoder)


@functools.lru_cache(maxsize=64)
def _padded(table: KernelTable) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Thresholds padded by some that nothing exceeds, and the codes of the magnitude indices."""
    size = _PADDED_THRESHOLDS[table.bits]
    start, gap = np.full(size, np.inf, np.float32), np.zeros(size, np.float32)
    lower = np.full(size, np.inf, np.float32)
    start[: table.thresholds], gap[: table.thresholds] = table.start, table.gap
    lower[: table.thresholds] = table.lower
    return start, gap, lower, np.arange(table.base, table.base + size + 1, dtype=np.uint32)
