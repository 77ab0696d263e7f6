"""Rotate, quantise and pack (EDEN) in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_adaptive.kernels.eden import (
    APART,
    SPAN,
    Buckets,
    Levels,
    finished_scales,
    power_of,
    rotate,
    shared_streams,
    weight_of,
)
from hvd_adaptive.kernels.packing import packing_of
from hvd_adaptive.kernels.reference.codes import pack_codes, unpack_codes
from hvd_adaptive.kernels.reference.tables import add_lanes, bucket_norms
from hvd_adaptive.kernels.reference.uniforms import mixed


def encode(
    flat: torch.Tensor,
    scales: torch.Tensor,
    words: torch.Tensor,
    bucket_size: int,
    levels: Levels,
    shared: int,
    own: int,
) -> None:
    """Rotate ``flat`` (float32, (n,)), round to the nearest levels, and pack.

    shared, own: streams of the rotations' signs; see kernels/eden.py for the former. scales:
    float32 (buckets,), filled with S = ‖y‖²/⟨y, q⟩ of the rotated bucket y and its levels q
    (Vargaftik et al. 2022, section 3); 0 if S is below the normal range, NaN if the bucket is not
    finite. Levels of a ``share`` below 1 have codes of a bucket's first rotated coordinates alone,
    with ⟨y, q⟩ over these. words: int32, filled.
    """
    streams = [*shared_streams(shared, levels.bits), own]
    codes = [flat.new_zeros(0, dtype=torch.int64)]
    for rows, first in _parts(flat, Buckets(flat.numel(), bucket_size)):
        numbers = range(first, first + len(rows))
        scales[first : first + len(rows)], quantized = _quantize(rows, numbers, levels, streams)
        codes.append(quantized.reshape(-1))
    words.copy_(pack_codes(torch.cat(codes), packing_of(1 << levels.bits)))


def decode_add(
    payloads: Sequence[tuple[torch.Tensor, torch.Tensor]],
    bucket_size: int,
    levels: Levels,
    shared: int,
    owns: Sequence[int],
    out: torch.Tensor,
) -> None:
    """Add the payloads' values, summed in order, to out (float32, (n,)).

    A payload is its (scales float32, words int32). Payloads share one rotation, which is inverted
    once, after the sum. Buckets whose scales are all 0 add nothing.
    """
    buckets = Buckets(out.numel(), bucket_size)
    values = torch.from_numpy(levels.values).to(out.device)
    for rows, first in _parts(out, buckets):
        total, length = torch.zeros_like(rows), rows.shape[1]
        kept, begin = levels.kept(length), first * levels.kept(bucket_size)
        own_numbers = range(first, first + len(rows))
        used = torch.zeros(len(rows), 1, dtype=torch.bool, device=out.device)
        for (scales, words), own in zip(payloads, owns, strict=True):
            count = levels.codes(buckets.codes, bucket_size)
            codes = unpack_codes(words, count, packing_of(1 << levels.bits))
            scale = scales[first : first + len(rows)].unsqueeze(1)
            taken = values[codes[begin : begin + len(rows) * kept]].view(-1, kept)
            y = torch.zeros_like(rows)
            y[:, :kept] = taken * (scale * weight_of(length))
            _rotate(y, own, own_numbers, back=True)
            total = torch.where(scale == 0, total, total + y)
            used |= scale != 0
        for stream in reversed(shared_streams(shared, levels.bits)):
            _rotate(total, stream, own_numbers, back=True)
            total *= weight_of(length)
        result = torch.where(used, rows + total, rows)
        target = out[first * bucket_size :][: rows.numel()]
        target.copy_(result.reshape(-1)[: target.numel()])


def _parts(flat: torch.Tensor, buckets: Buckets) -> list[tuple[torch.Tensor, int]]:
    """Return rows of whole buckets and of the partial one, each with its first bucket's number."""
    split, found = buckets.whole * buckets.size, []
    if buckets.whole:
        found.append((flat[:split].view(-1, buckets.size), 0))
    if buckets.rest:
        padded = flat.new_zeros(1, buckets.last)
        padded[0, : buckets.rest] = flat[split:]
        found.append((padded, buckets.whole))
    return found


def _quantize(
    rows: torch.Tensor, numbers: Sequence[int], levels: Levels, streams: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales (buckets,) and codes (int64, (buckets, kept coordinates)). A bucket is
    multiplied by the power of two that brings its largest coordinate into [2, 4), so that nothing
    overflows.
    """
    length = rows.shape[1]
    largest = bucket_norms(rows.reshape(-1), length, "linf")
    usable = (largest > 0).unsqueeze(1)
    y = torch.where(usable, rows * power_of(largest).unsqueeze(1), 0.0)
    for stream in streams:
        _rotate(y, stream, numbers, back=False)
    norm = bucket_norms(y.reshape(-1), length, "l2")
    deviation = (norm * length**-0.5).unsqueeze(1)
    y = y[:, : levels.kept(length)]
    thresholds = torch.from_numpy(levels.thresholds).to(rows.device)
    half = 1 << (levels.bits - 1)
    place = torch.zeros_like(y, dtype=torch.int64)
    for threshold in thresholds[half:]:
        place += y.abs() >= threshold * deviation
    product = add_lanes(y.abs() * torch.from_numpy(levels.values[half:]).to(rows.device)[place])
    codes = torch.where(y < 0, half - 1 - place, half + place)
    scales = finished_scales(largest, norm, product, weight_of(length, len(streams)))
    return scales, torch.where((scales > 0).unsqueeze(1), codes, 0)


def _rotate(y: torch.Tensor, stream: int, numbers: Sequence[int], back: bool) -> None:
    def flip(turn: int) -> None:
        y.mul_(_signs(stream, [number + turn for number in numbers], y.shape[1], y.device))

    rotate(y, flip, back)


def _signs(stream: int, numbers: Sequence[int], length: int, device: torch.device) -> torch.Tensor:
    """Return the signs of the buckets ``numbers``: float32 (len(numbers), length)."""
    j = torch.arange(length, dtype=torch.int64, device=device)
    h = mixed(stream, numbers, j // SPAN * APART + j % APART)
    return (1 - 2 * (h >> (j // APART % 32) & 1)).to(torch.float32)
