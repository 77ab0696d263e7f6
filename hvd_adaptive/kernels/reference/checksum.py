"""Compute checksums of whole payloads, in plain torch.

A payload is uint8, a multiple of 8 bytes long; its first 96 bytes are the header. The checksum
covers what follows the header and is seeded with the header's own part.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from hvd_adaptive.base.tensors import put
from hvd_adaptive.kernels.checksum import BLOCK, CHECKSUM_AT, HEADER_BYTES, LANES, A, B
from hvd_adaptive.kernels.constants import MASK32


def seal(payload: torch.Tensor, header: bytes, seed: int | None) -> None:
    """Write ``header`` to the beginning of ``payload``, with a checksum if there is a seed."""
    data = bytearray(header)
    if seed is not None:
        struct.pack_into("<I", data, CHECKSUM_AT, *checksums([payload], [seed]))
    put(torch.frombuffer(data, dtype=torch.uint8), payload[:HEADER_BYTES])


def checksums(payloads: Sequence[torch.Tensor], seeds: Sequence[int]) -> list[int]:
    """Return the checksum of each payload. Kernels that do not wait for the device return a tensor:
    int32 (payloads,).
    """
    bodies = [payload[HEADER_BYTES:].view(torch.int32) for payload in payloads]
    return [checksum(*pair) for pair in zip(bodies, seeds, strict=True)]


def checksum(words: torch.Tensor, seed: int) -> int:
    """Return the position-dependent 32-bit checksum of ``words`` (int32): see docs/wire_format.md.
    Lanes start from the block's number, so that no block waits for another.
    """
    count = -(-words.numel() // BLOCK)
    rows = torch.zeros(count * BLOCK, dtype=torch.int64, device=words.device)
    rows[: words.numel()] = words.to(torch.int64) & MASK32
    there = torch.arange(rows.numel(), device=words.device) < words.numel()
    lanes = torch.arange(count, device=words.device).view(-1, 1).repeat(1, LANES)
    lanes = lanes * A & MASK32
    shape = (count, BLOCK // LANES, LANES)
    for row, known in zip(rows.view(shape).unbind(1), there.view(shape).unbind(1), strict=True):
        s = (lanes + (row * B & MASK32)) & MASK32
        s = ((s << 13) | (s >> 19)) & MASK32
        lanes = torch.where(known, s * A & MASK32, lanes)
    sums = ((lanes ^ lanes >> 15) * B & MASK32).sum(dim=0) & MASK32
    total = (seed + words.numel()) & MASK32
    for lane in sums.tolist():
        total = ((total ^ lane) * A) & MASK32
        total ^= total >> 15
        total = (total * B) & MASK32
    return total
