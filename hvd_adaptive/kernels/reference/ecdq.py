"""Quantise with dither in plain torch and Python: the oracle for the fast kernels.

The dither of a coordinate comes from its integer k below 2**24 (reference/uniforms.py). The top bit
is the dither's sign. The other bits, m = k mod 2**23, give its size a = (m + 1/2)/2**24 in (0,
1/2), and the top bits of m give its class, one of 1, 2 or 4. A coordinate v in a bucket of step s
becomes q = round(±v/s + a), to even at halves, and is decoded as ±s (q - a).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hvd_adaptive.kernels.constants import SMALLEST_NORM
from hvd_adaptive.kernels.dithered import HALF, Stretch, step_factors
from hvd_adaptive.kernels.reference.tables import bucket_norms, per_coordinate
from hvd_adaptive.kernels.reference.uniforms import uniforms


def bucket_steps(flat: torch.Tensor, bucket_size: int, delta: float) -> torch.Tensor:
    """Return the steps of the buckets of ``flat`` (float32, (n,)).

    A step is 0 for a zero bucket and if it falls below the normal range. It is NaN if the bucket,
    its norm or its step is not finite.
    """
    steps = bucket_norms(flat, bucket_size, "l2")
    whole, last = step_factors(flat.numel(), bucket_size, delta).tolist()
    steps[:-1] *= whole
    steps[-1:] *= last
    steps = torch.where(steps < SMALLEST_NORM, torch.zeros_like(steps), steps)
    return torch.where(steps.isfinite(), steps, torch.full_like(steps, torch.nan))


@dataclass(frozen=True)
class Dither:
    """Hold every coordinate's dither: sign (bool, True is negative), size a and m (float32)."""

    negative: torch.Tensor
    size: torch.Tensor
    m: torch.Tensor

    @classmethod
    def of(cls, coordinates: int, bucket_size: int, key: int, device: torch.device) -> Dither:
        k = uniforms(coordinates, bucket_size, key, device)
        negative = k >= HALF
        m = torch.where(negative, k - HALF, k)
        return cls(negative, (m + 0.5) * 2.0**-24, m)


def quantize(flat: torch.Tensor, steps: torch.Tensor, bucket_size: int, key: int) -> torch.Tensor:
    """Return q (int32) of all coordinates; 0 in buckets without a step above 0."""
    n, usable = flat.numel(), steps > 0
    dither = Dither.of(n, bucket_size, key, flat.device)
    inverse = torch.where(usable, 1.0 / steps, torch.zeros_like(steps))
    y = torch.where(dither.negative, -flat, flat) * per_coordinate(inverse, n, bucket_size)
    q = torch.round(y + dither.size)
    return torch.where(per_coordinate(usable, n, bucket_size), q, 0.0).to(torch.int32)


def add(
    q: torch.Tensor, steps: torch.Tensor, bucket_size: int, key: int, out: torch.Tensor
) -> None:
    """Add the decoded values of ``q`` (int32) to ``out`` (float32); NaN if the step is NaN."""
    dither = Dither.of(out.numel(), bucket_size, key, out.device)
    spread = per_coordinate(steps, out.numel(), bucket_size)
    value = (q.to(torch.float32) - dither.size) * spread
    value = torch.where(dither.negative, -value, value)
    out += torch.where(spread > 0, value, torch.where(spread.isnan(), spread, 0.0))


@dataclass(frozen=True)
class Splitter:
    """Quantise and ``split`` segments of at most ``size`` coordinates."""

    size: int
    classes: int
    most: int
    dtype: type

    def __call__(self, flat: torch.Tensor, where: Stretch) -> tuple[list[np.ndarray], np.ndarray]:
        q = quantize(flat, where.steps, where.bucket_size, where.key)
        return split(q, where, self.classes, self.most)


def split(
    q: torch.Tensor, where: Stretch, classes: int, most: int
) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the symbols (uint16) of each class, in order, and the escaped integers (int32).

    Only coordinates in buckets with a step above 0 have symbols. q: int32, of all coordinates. The
    symbol of q is its place in -most..most; the next symbol is the escape. Escaped integers are
    in the coordinates' order.
    """
    usable, group = _classes(where, classes)
    part, group = q[where.begin : where.end][usable], group[usable]
    symbols = torch.where(part.abs() > most, 2 * most + 1, part + most).cpu().numpy()
    runs = [symbols[(group == c).cpu().numpy()].astype(np.uint16) for c in range(classes)]
    return runs, part[part.abs() > most].cpu().numpy()


def add_runs(
    runs: np.ndarray, escaped: np.ndarray, where: Stretch, most: int, out: torch.Tensor
) -> bool:
    """Add the values of a stretch of ``out``; return whether the escaped integers fit the runs.

    runs: uint8 or uint16 (classes, ...); each row begins with as many symbols as ``counts`` gives.
    """
    usable, group = _classes(where, len(runs))
    q, total = torch.zeros_like(out, dtype=torch.int32), out.clone()
    part = q[where.begin : where.end]
    for c, (run, count) in enumerate(zip(runs, counts(where, len(runs)), strict=True)):
        symbols = torch.from_numpy(run[:count].astype(np.int32) - most)
        part[usable & (group == c)] = symbols.to(q.device)
    wanting = part > most
    if escaped.size != int(wanting.sum()):
        return False
    part[wanting] = torch.from_numpy(escaped).to(q.device)
    add(q, where.steps, where.bucket_size, where.key, total)
    out[where.begin : where.end] = total[where.begin : where.end]
    return True


def counts(where: Stretch, classes: int) -> np.ndarray:
    """Return the number of symbols of each class, int64."""
    usable, group = _classes(where, classes)
    return np.array([int((usable & (group == c)).sum()) for c in range(classes)])


def _classes(where: Stretch, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which coordinates have symbols, and the class (int64) of each coordinate."""
    steps, bucket_size, key, begin, end = where
    m = Dither.of(end, bucket_size, key, steps.device).m[begin:end]
    usable = per_coordinate(steps > 0, end, bucket_size)[begin:end]
    return usable, (m * (classes / HALF)).to(torch.int64)


def put_numbers(values: np.ndarray, most: int) -> np.ndarray:
    """Convert escaped integers (int32) to bytes (uint8).

    They are numbered from the inside out, even numbers for positive ones, and stored as bytes of 7
    bits, lowest first; all bytes of a number but the last have the top bit set.
    """
    data = []
    for q in values.tolist():
        rest = 2 * (abs(q) - most - 1) + (q < 0)
        while rest > 127:
            data.append(rest % 128 + 128)
            rest //= 128
        data.append(rest)
    return np.array(data, np.uint8)


def numbers(data: np.ndarray, most: int) -> np.ndarray | None:
    """Invert ``put_numbers``; return None if a number is cut off, padded with zeros, or beyond 30
    bits.
    """
    values, number, shift = [], 0, 0
    for byte in data.tolist():
        number += (byte & 127) << shift
        shift += 7
        if shift > 35 or number >= 2**31 or (byte == 0 and shift > 7):
            return None
        if byte < 128:
            size = number // 2 + most + 1
            values.append(-size if number % 2 else size)
            number = shift = 0
    return None if shift else np.array(values, np.int32)
