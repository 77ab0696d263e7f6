"""The kernels in plain torch: slow, for any device, and the oracle for the fast ones.

Every product and sum is written as its own float32 operation in the order that the fast kernels
follow, so that they can be compared bit for bit.
"""

from __future__ import annotations

import numpy as np
import torch

from hvd_adaptive.coding.fixed import BLOCK, LANES, QUARTERS, ROWS, packed_words, partial_rows
from hvd_adaptive.kernels import random
from hvd_adaptive.kernels.tables import KernelTable

NORM_LANES = 32
SMALLEST_NORM = 2.0**-126
BINS, COARSE_BINS = 1664, 128
CHECK_LANES = 64
CHECK_A, CHECK_B = 0x9E3779B1, 0x85EBCA77
MASK32 = 0xFFFFFFFF


def encode(
    flat: torch.Tensor,
    scales: torch.Tensor,
    words: torch.Tensor,
    bucket_size: int,
    norm: str,
    table: KernelTable,
    key: int,
) -> None:
    """Quantise ``flat`` (float32, (n,)) bucket by bucket and pack the codes.

    Fills ``scales`` (float32, one per bucket: its norm, NaN for a bucket with a non-finite
    coordinate or an overflowing norm, 0 for a zero bucket) and ``words`` (int32).
    """
    scales.copy_(bucket_norms(flat, bucket_size, norm))
    codes = quantize(flat, scales, bucket_size, table, key)
    words.copy_(pack(codes, table.bits))


def bucket_norms(flat: torch.Tensor, bucket_size: int, norm: str) -> torch.Tensor:
    """L2 or L-infinity norms of the buckets, summed in the fixed 32-lane tree."""
    count = -(-flat.numel() // bucket_size)
    width = -(-bucket_size // NORM_LANES) * NORM_LANES
    padded = flat.new_zeros(count * bucket_size)
    padded[: flat.numel()] = flat
    lanes = flat.new_zeros(count, width)
    lanes[:, :bucket_size] = padded.view(count, bucket_size)
    lanes = lanes.view(count, width // NORM_LANES, NORM_LANES)
    if norm == "linf":
        norms = lanes.abs().amax(dim=(1, 2))
    else:
        total = _tree_of_squares(lanes)
        up, down = lanes * 2.0**96, lanes * 2.0**-96
        norms = torch.where(
            total < 2.0**-80,
            _sqrt(_tree_of_squares(up)) * 2.0**-96,
            torch.where(
                total <= 2.0**120,
                _sqrt(total),
                _sqrt(_tree_of_squares(down)) * 2.0**96,
            ),
        )
    norms = torch.where(norms < SMALLEST_NORM, torch.zeros_like(norms), norms)
    return torch.where(torch.isfinite(norms), norms, torch.full_like(norms, torch.nan))


def clipped(flat: torch.Tensor, bucket_size: int, clip: float) -> torch.Tensor:
    """A copy of ``flat`` whose coordinates lie within ``clip`` deviations of their bucket.

    The deviation is the root mean square: Eq. 49 of the ALQ paper clips about zero, and a deviation
    about the mean would clip a constant bucket to nothing. A bucket without a norm becomes NaN.
    """
    norms = bucket_norms(flat, bucket_size, "l2")
    sizes = torch.full_like(norms, bucket_size, dtype=torch.float64)
    sizes[-1:] = flat.numel() - (len(norms) - 1) * bucket_size
    limits = norms * (clip / torch.sqrt(sizes)).to(torch.float32)
    limit = _per_coordinate(limits, flat.numel(), bucket_size)
    return torch.where(limit.isnan(), limit, torch.minimum(torch.maximum(flat, -limit), limit))


def _sqrt(x: torch.Tensor) -> torch.Tensor:
    """Correctly rounded; torch's own float32 square root is off by one unit on some builds."""
    return torch.sqrt(x.to(torch.float64)).to(torch.float32)


def _tree_of_squares(lanes: torch.Tensor) -> torch.Tensor:
    total = lanes.new_zeros(lanes.shape[0], NORM_LANES)
    for row in range(lanes.shape[1]):
        total = total + lanes[:, row] * lanes[:, row]
    half = NORM_LANES // 2
    while half:
        total = total[:, :half] + total[:, half : 2 * half]
        half //= 2
    return total[:, 0]


def uniforms(coordinates: int, bucket_size: int, key: int, device: torch.device) -> torch.Tensor:
    """The integers below 2**24 (float32) that round ``coordinates`` coordinates."""
    count = -(-coordinates // bucket_size)
    keys = [random.bucket_key(key, bucket) for bucket in range(count)]
    low, high = torch.tensor(keys, dtype=torch.int64, device=device).view(count, 2, 1).unbind(1)
    j = torch.arange(bucket_size, dtype=torch.int64, device=device)
    h = ((j * random.COUNTER & MASK32) + low) & MASK32
    h = ((h ^ (h >> 16)) * random.MIX32_A) & MASK32
    h = (h + high) & MASK32
    h = ((h ^ (h >> 13)) * random.MIX32_B) & MASK32
    return (h >> 8).to(torch.float32).reshape(-1)[:coordinates]


def quantize(
    flat: torch.Tensor, scales: torch.Tensor, bucket_size: int, table: KernelTable, key: int
) -> torch.Tensor:
    """Codes (int64, (n,)) of ``flat`` under stochastic rounding; 0 in zero and NaN buckets."""
    usable = scales > 0
    inverse = torch.where(usable, 1.0 / scales, torch.zeros_like(scales))
    r = flat.abs() * _per_coordinate(inverse, flat.numel(), bucket_size)
    u = uniforms(flat.numel(), bucket_size, key, flat.device)
    m = torch.zeros(flat.numel(), dtype=torch.int64, device=flat.device)
    for start, gap in zip(table.start.tolist(), table.gap.tolist(), strict=True):
        m += r > u * gap + start
    codes = (m + table.base) ^ torch.where(flat < 0, table.negative, 0)
    return torch.where(_per_coordinate(usable, flat.numel(), bucket_size), codes, 0)


def _per_coordinate(values: torch.Tensor, coordinates: int, bucket_size: int) -> torch.Tensor:
    return values.repeat_interleave(bucket_size)[:coordinates]


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes (int64, (n,)) to words (int32), laid out as coding/fixed.py says."""
    full = codes.numel() // BLOCK * BLOCK
    parts = [_pack_blocks(codes[:full].view(-1, QUARTERS, ROWS, LANES), bits)]
    rest = codes.numel() - full
    if rest:
        rows = partial_rows(rest)
        padded = codes.new_zeros(QUARTERS * rows * LANES)
        padded[:rest] = codes[full:]
        parts.append(_pack_blocks(padded.view(1, QUARTERS, rows, LANES), bits))
    return torch.cat(parts)


def _pack_blocks(codes: torch.Tensor, bits: int) -> torch.Tensor:
    blocks, _, rows, _ = codes.shape
    count = -(-rows * QUARTERS * bits // 32)
    words = codes.new_zeros(blocks, count, LANES)
    for row in range(rows):
        for quarter in range(QUARTERS):
            word, bit = divmod((QUARTERS * row + quarter) * bits, 32)
            shifted = codes[:, quarter, row] << bit
            words[:, word] |= shifted & MASK32
            if bit + bits > 32:
                words[:, word + 1] |= shifted >> 32
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).reshape(-1)


def unpack(words: torch.Tensor, coordinates: int, bits: int) -> torch.Tensor:
    """Inverse of ``pack``: codes (int64, (coordinates,))."""
    full = coordinates // BLOCK * BLOCK
    split = packed_words(full, bits)
    parts = [_unpack_blocks(words[:split].view(-1, bits, LANES), ROWS, bits)]
    rest = coordinates - full
    if rest:
        rows = partial_rows(rest)
        tail = words[split : packed_words(coordinates, bits)].view(1, -1, LANES)
        parts.append(_unpack_blocks(tail, rows, bits)[:rest])
    return torch.cat(parts)


def _unpack_blocks(words: torch.Tensor, rows: int, bits: int) -> torch.Tensor:
    wide = words.to(torch.int64) & MASK32
    codes = wide.new_zeros(wide.shape[0], QUARTERS, rows, LANES)
    for row in range(rows):
        for quarter in range(QUARTERS):
            word, bit = divmod((QUARTERS * row + quarter) * bits, 32)
            value = wide[:, word] >> bit
            if bit + bits > 32:
                value = value | wide[:, word + 1] << (32 - bit)
            codes[:, quarter, row] = value & ((1 << bits) - 1)
    return codes.reshape(-1)


def decode_add(
    payloads: list[tuple[torch.Tensor, torch.Tensor]],
    bucket_size: int,
    table: KernelTable,
    factor: float,
    out: torch.Tensor,
) -> None:
    """out (float32, (n,)) becomes factor * (out + the payloads' values, added in order).

    A payload is its (scales float32, words int32).
    """
    values = torch.from_numpy(table.values).to(out.device)
    for scales, words in payloads:
        codes = unpack(words, out.numel(), table.bits)
        out += values[codes] * _per_coordinate(scales, out.numel(), bucket_size)
    if factor != 1.0:
        out *= factor


def histogram(bucket: torch.Tensor, scale: float) -> np.ndarray:
    """Counts of r = abs(v)/scale, int64 (1666,): log-spaced bins, the zeros, the ones.

    Bins 1 to 127 begin at 2**(-28 + k//8) * (1 + k%8 / 8), bins 128 + k at 2**(-12 + k//128)
    * (1 + k%128 / 128); bin 0 begins above zero.
    """
    r = bucket.abs() * (1.0 / torch.tensor(scale, dtype=torch.float32))
    bits = r.view(torch.int32)
    coarse = ((bits >> 20) - ((127 - 28) << 3)).clamp(min=0)
    index = torch.where(r < 2.0**-12, coarse, (bits >> 16) - ((127 - 12) << 7) + COARSE_BINS)
    index = torch.where(r == 0, BINS, torch.where(r >= 1, BINS + 1, index))
    return torch.bincount(index.to(torch.int64), minlength=BINS + 2).cpu().numpy()


def checksum(words: torch.Tensor, seed: int) -> int:
    """Position-dependent 32-bit checksum of ``words`` (int32): 64 lanes, then a chain over them."""
    wide = words.to(torch.int64) & MASK32
    lanes = torch.zeros(CHECK_LANES, dtype=torch.int64, device=words.device)
    for begin in range(0, wide.numel(), CHECK_LANES):
        row = wide[begin : begin + CHECK_LANES]
        s = (lanes[: row.numel()] + (row * CHECK_B & MASK32)) & MASK32
        s = ((s << 13) | (s >> 19)) & MASK32
        lanes[: row.numel()] = s * CHECK_A & MASK32
    total = (seed + wide.numel()) & MASK32
    for lane in lanes.tolist():
        total = ((total ^ lane) * CHECK_A) & MASK32
        total ^= total >> 15
        total = (total * CHECK_B) & MASK32
    return total
