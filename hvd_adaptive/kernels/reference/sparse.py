"""Sparsify at random in plain torch and Python: the oracle for the fast kernels."""

from __future__ import annotations

import numpy as np
import torch

from hvd_adaptive.kernels.constants import SMALLEST_NORM
from hvd_adaptive.kernels.reference.tables import add_lanes, per_coordinate, rows_of
from hvd_adaptive.kernels.reference.uniforms import uniforms
from hvd_adaptive.kernels.sparse import Sections
from hvd_adaptive.kernels.tables import UNIFORM_SCALE


def encode(flat: torch.Tensor, bucket_size: int, density: float, k: int, key: int) -> Sections:
    """Keep coordinates of ``flat`` (float32, (n,)) at random: see schemes/sparse.py.

    The threshold of a bucket is λ; it is 0 for a zero bucket, and NaN for a bucket with NaN or Inf
    or whose λ overflows. ``words`` is the stream of kernels/sparse.py with parameter ``k``.
    """
    buckets = flat.split(bucket_size) if flat.numel() else ()
    lambdas = flat.new_tensor([threshold(bucket, density) for bucket in buckets])
    limits = per_coordinate(lambdas, flat.numel(), bucket_size)
    sizes = flat.abs()
    u = uniforms(flat.numel(), bucket_size, key, flat.device)
    fraction = u * float(UNIFORM_SCALE) + float(UNIFORM_SCALE / 2)
    usable = (limits > 0) & (sizes >= SMALLEST_NORM)
    exact = usable & (sizes >= limits)
    kept = (exact | (usable & (sizes / limits > fraction))).nonzero()[:, 0]
    stream, last = [], -1
    tails = torch.where(exact, 2, (flat < 0).to(torch.int64))[kept].tolist()
    for index, tail in zip(kept.tolist(), tails, strict=True):
        gap = index - last - 1
        low = "".join(str(gap >> bit & 1) for bit in range(k))
        stream.append("0" * (gap >> k) + "1" + low + ("00", "01", "1")[tail])
        last = index
    bits = np.frombuffer("".join(stream).encode(), np.uint8) - ord("0")
    padded = np.zeros(-(-bits.size // 32) * 32, np.uint8)
    padded[: bits.size] = bits
    words = torch.from_numpy(np.packbits(padded, bitorder="little").view(np.int32))
    return lambdas, flat[exact], words.to(flat.device)


def threshold(bucket: torch.Tensor, density: float) -> float:
    """Return λ of one bucket (float32): the sum of min(1, abs(v)/λ) is ``density`` times its size.

    This is Wangni et al.'s Algorithm 3, whose factor is 1/λ: start from λ as if no coordinate
    reached it, then leave out those that do, until no more do. λ falls, so the loop ends with the
    solution or its next neighbour. If rounding makes λ rise, fewer coordinates reach it, and that
    also ends the loop. Sums are float64 in the fixed tree. λ is rounded up, so that no more
    coordinates than the density allows reach it. Coordinates below the normal range count as zeros.
    """
    if not bool(bucket.isfinite().all()):
        return float("nan")
    wanted = density * bucket.numel()
    sizes = bucket.abs()
    sizes = torch.where(sizes < SMALLEST_NORM, torch.zeros_like(sizes), sizes)
    lanes = rows_of(sizes, sizes.numel(), torch.float64)
    rest, exact = float(add_lanes(lanes)), 0
    if rest == 0:
        return 0.0
    while True:
        limit = _rounded_up(rest / (wanted - exact))
        if not np.isfinite(limit):
            return float("nan")
        before, exact = exact, int((lanes >= limit).sum())
        rest = float(add_lanes(torch.where(lanes < limit, lanes, torch.zeros_like(lanes))))
        if exact <= before or rest == 0 or exact >= wanted:
            return limit


def _rounded_up(value: float) -> float:
    with np.errstate(over="ignore"):
        nearest = np.float32(value)
    return float(np.nextafter(nearest, np.float32(np.inf)) if float(nearest) < value else nearest)


def add(sections: Sections, bucket_size: int, k: int, out: torch.Tensor) -> bool:
    """Add a payload's values to ``out`` (float32, (n,)); return whether its stream is readable.

    Only ``out`` is written, whatever the stream holds.
    """
    lambdas, exact, words = sections
    out[per_coordinate(lambdas.isnan(), out.numel(), bucket_size)] = torch.nan
    data = words.cpu().numpy().view(np.uint8)
    bits = (np.unpackbits(data, bitorder="little") + ord("0")).tobytes().decode()
    indices: list[int] = []
    kinds: list[int] = []
    at, index = 0, -1
    while (one := bits.find("1", at)) >= 0:
        low, end = bits[one + 1 : one + 1 + k], one + 2 + k
        if end > len(bits):
            return False
        full = bits[end - 1] == "1"
        if not full and end == len(bits):
            return False
        index += (one - at << k) + int("0" + low[::-1], 2) + 1
        if index >= out.numel():
            return False
        indices.append(index)
        kinds.append(2 if full else int(bits[end]))
        at = end if full else end + 1
    where = torch.tensor(indices, dtype=torch.int64, device=out.device)
    kind = torch.tensor(kinds, dtype=torch.int64, device=out.device)
    if int((kind == 2).sum()) != exact.numel():
        return False
    values = lambdas[where // bucket_size]
    values = torch.where(kind == 1, -values, values)
    values[kind == 2] = exact
    out[where] += values
    return True
