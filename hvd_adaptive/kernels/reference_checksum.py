"""Checksums of whole payloads, in plain torch: uint8 of a multiple of 8 bytes, 96 of them header.

The checksum of what follows the header (reference.checksum), seeded with the header's own part.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from hvd_adaptive import kernels
from hvd_adaptive.coding.header import CHECKSUM_AT, SIZE
from hvd_adaptive.device import put
from hvd_adaptive.kernels.block_sums import BlockSums


def seal(
    payload: torch.Tensor, header: bytes, seed: int | None, known: BlockSums | None = None
) -> None:
    """Write ``header`` to the beginning of ``payload``, and the checksum, where there is a seed, to
    its place in the header. known: of the body, which kernels for the CPU need not sum again."""
    data = bytearray(header)
    if seed is not None:
        struct.pack_into("<I", data, CHECKSUM_AT, _checksum(payload, seed))
    put(torch.frombuffer(data, dtype=torch.uint8), payload[:SIZE])


def checksums(
    payloads: Sequence[torch.Tensor], seeds: Sequence[int]
) -> Sequence[int] | torch.Tensor:
    """Of each payload: numbers here, 32 bits as int32 (payloads,) where they are still made."""
    return [_checksum(*pair) for pair in zip(payloads, seeds, strict=True)]


def _checksum(payload: torch.Tensor, seed: int) -> int:
    words = payload[SIZE:].view(torch.int32)
    return kernels.for_device(payload.device).checksum(words, seed)
