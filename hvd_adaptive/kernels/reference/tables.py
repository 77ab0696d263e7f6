"""Quantise to level tables in plain torch."""

from __future__ import annotations

import torch

from hvd_adaptive.kernels.constants import NORM_LANES, SMALLEST_NORM
from hvd_adaptive.kernels.reference.codes import pack_codes, unpack_codes
from hvd_adaptive.kernels.reference.uniforms import uniforms
from hvd_adaptive.kernels.tables import (
    HALF_BITS,
    LOG2_COEFFICIENTS,
    MANTISSA_BITS,
    UNIFORM_SCALE,
    KernelTable,
    errors_of,
)
from hvd_adaptive.kernels.tables import histogram as histogram


def encode(
    flat: torch.Tensor,
    scales: torch.Tensor,
    words: torch.Tensor,
    bucket_size: int,
    norm: str,
    table: KernelTable,
    key: int,
    clip: float | None = None,
) -> None:
    """Quantise ``flat`` (float32, (n,)) by buckets, clipped if ``clip`` is given; pack the codes.

    Fill ``scales`` (float32, one per bucket: its norm, NaN for a bucket with a non-finite
    coordinate or an overflowing norm, 0 for a zero bucket) and ``words`` (int32).
    """
    if clip is not None:
        flat = clipped(flat, bucket_size, clip)
    scales.copy_(bucket_norms(flat, bucket_size, norm))
    words.copy_(pack_codes(quantize(flat, scales, bucket_size, table, key), table.packing))


def rows_of(flat: torch.Tensor, bucket_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the buckets as rows of ``dtype``, filled with zeros to a multiple of 32 columns."""
    count = -(-flat.numel() // bucket_size)
    padded = flat.new_zeros(count * bucket_size)
    padded[: flat.numel()] = flat
    rows = flat.new_zeros(count, -(-bucket_size // NORM_LANES) * NORM_LANES, dtype=dtype)
    rows[:, :bucket_size] = padded.view(count, bucket_size)
    return rows


def add_lanes(rows: torch.Tensor) -> torch.Tensor:
    """Sum each row: lane l adds numbers l, l + 32, ... in order, then a tree adds the lanes."""
    lanes = rows.new_zeros(len(rows), NORM_LANES)
    for part in rows.split(NORM_LANES, dim=1):
        lanes = lanes + part
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def per_coordinate(values: torch.Tensor, coordinates: int, bucket_size: int) -> torch.Tensor:
    """Return the value of each coordinate's bucket."""
    return values.repeat_interleave(bucket_size)[:coordinates]


def bucket_norms(flat: torch.Tensor, bucket_size: int, norm: str) -> torch.Tensor:
    """Return the L2 or L-infinity norms of the buckets, summed in the fixed 32-lane tree."""
    rows = rows_of(flat, bucket_size, flat.dtype)
    if norm == "linf":
        norms = rows.abs().amax(dim=1)
    else:
        total = add_lanes(rows * rows)
        factor = torch.where(total <= 2.0**120, torch.ones_like(total), 2.0**-96)
        factor = torch.where(total < 2.0**-80, 2.0**96, factor)
        rows = rows * factor.unsqueeze(1)
        # Torch's float32 root is off by one unit on some builds.
        root = torch.sqrt(add_lanes(rows * rows).to(torch.float64)).to(torch.float32)
        norms = root / factor
    norms = torch.where(norms < SMALLEST_NORM, torch.zeros_like(norms), norms)
    return torch.where(torch.isfinite(norms), norms, torch.full_like(norms, torch.nan))


def errors(flat: torch.Tensor, bucket_size: int, norm: str, table: KernelTable) -> torch.Tensor:
    """Return ``errors_of`` buckets that are scaled by ``norm``."""
    return errors_of(flat, bucket_norms(flat, bucket_size, norm), bucket_size, table)


def clipped(flat: torch.Tensor, bucket_size: int, clip: float) -> torch.Tensor:
    """Return a copy of ``flat`` whose coordinates lie within ``clip`` deviations of their bucket.

    The deviation is the root mean square: Eq. 49 of the ALQ paper clips about zero, and a deviation
    about the mean would clip a constant bucket to nothing. A bucket without a norm becomes NaN.
    """
    norms = bucket_norms(flat, bucket_size, "l2")
    sizes = torch.full_like(norms, bucket_size, dtype=torch.float64)
    sizes[-1:] = flat.numel() - (len(norms) - 1) * bucket_size
    limits = norms * (clip / torch.sqrt(sizes)).to(torch.float32)
    limit = per_coordinate(limits, flat.numel(), bucket_size)
    raised = torch.where(flat < -limit, -limit, flat)
    inside = torch.where(raised > limit, limit, raised)
    return torch.where(limit.isnan(), limit, inside)


def quantize(
    flat: torch.Tensor, scales: torch.Tensor, bucket_size: int, table: KernelTable, key: int
) -> torch.Tensor:
    """Return codes (int64, (n,)) of ``flat`` under stochastic rounding. Zero and NaN buckets have
    codes alphabet // 2, the level nearest zero, which coders make shortest.
    """
    usable = scales > 0
    inverse = torch.where(usable, 1.0 / scales, torch.zeros_like(scales))
    r = flat.abs() * per_coordinate(inverse, flat.numel(), bucket_size)
    u = uniforms(flat.numel(), bucket_size, key, flat.device)
    codes = _INDEX[table.rule](r, u, table) + table.base
    codes = torch.where(flat < 0, table.alphabet - 1 - codes, codes)
    return torch.where(
        per_coordinate(usable, flat.numel(), bucket_size), codes, table.alphabet // 2
    )


def _count(r: torch.Tensor, u: torch.Tensor, table: KernelTable) -> torch.Tensor:
    """Count the thresholds that r exceeds."""
    m = torch.zeros(r.numel(), dtype=torch.int64, device=r.device)
    for start, gap in zip(table.start.tolist(), table.gap.tolist(), strict=True):
        m += r > u * gap + start
    return m


def _uniform(r: torch.Tensor, u: torch.Tensor, table: KernelTable) -> torch.Tensor:
    """Return the index on a uniform table."""
    slope, offset = table.numbers[:2].tolist()
    y = r.clamp(max=1.0) * slope + offset
    whole = y.trunc()
    fraction = u * float(UNIFORM_SCALE) + float(UNIFORM_SCALE / 2)
    return whole.to(torch.int64) + (y - whole > fraction)


def _exponential(r: torch.Tensor, u: torch.Tensor, table: KernelTable) -> torch.Tensor:
    """Return the index on an exponential table, by the logarithm of w."""
    gain, first, per_octave, top = table.numbers.tolist()
    bits = (r / (u * gain + first)).view(torch.int32) - HALF_BITS
    t = ((bits & MANTISSA_BITS) + HALF_BITS).view(torch.float32) - 1.0
    polynomial = torch.full_like(t, LOG2_COEFFICIENTS[-1])
    for coefficient in LOG2_COEFFICIENTS[-2::-1]:
        polynomial = polynomial * t + coefficient
    log2 = (bits >> 23).to(torch.float32) + polynomial * t
    m = (log2 * per_octave + top).to(torch.int64).clamp(1, table.thresholds)
    least = (r > u * float(table.gap[0]) + float(table.start[0])).to(torch.int64)
    return torch.where(r > float(table.lower[1]), m, least)


_INDEX = {"thresholds": _count, "uniform": _uniform, "exponential": _exponential}


def decode_add(
    payloads: list[tuple[torch.Tensor, torch.Tensor]],
    bucket_size: int,
    table: KernelTable,
    factor: float,
    out: torch.Tensor,
    add: bool = True,
) -> None:
    """Set out (float32, (n,)) to factor * (out + the payloads' values, added in order). A payload
    is its (scales float32, words int32). add: if False, ``out`` counts as zeros.
    """
    if not add:
        out.zero_()
    values = torch.from_numpy(table.values).to(out.device)
    for scales, words in payloads:
        codes = unpack_codes(words, out.numel(), table.packing)
        out += values[codes] * per_coordinate(scales, out.numel(), bucket_size)
    if factor != 1.0:
        out *= factor
