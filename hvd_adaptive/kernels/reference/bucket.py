"""Pack codes of buckets that have levels of their own, in plain torch: the oracle."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_adaptive.kernels.packing import packing_of
from hvd_adaptive.kernels.reference.codes import pack_codes, unpack_codes
from hvd_adaptive.kernels.reference.tables import per_coordinate
from hvd_adaptive.kernels.reference.uniforms import uniforms
from hvd_adaptive.kernels.tables import padded_values


def round_codes(
    flat: torch.Tensor, levels: torch.Tensor, words: torch.Tensor, bucket_size: int, key: int
) -> None:
    """Round ``flat`` (float32, (n,)) at random to its buckets' levels (ORQ paper, Eq. 7); pack.

    levels: float32 (buckets, alphabet), ascending; a coordinate v beyond them becomes the nearest
    level. words: int32, filled. The numbers of a bucket are multiplied by the power of two that
    brings its largest level into [2, 4), so that no difference overflows or is lost. With k | 1 for
    an integer k below 2**24 (reference/uniforms.py) the code is #{j: v - level_j > (k | 1) 2**-24
    (level_j+1 - level_j)}, so a v on a level always keeps that level. Buckets of zero or NaN levels
    have codes 0.
    """
    largest = torch.maximum(levels[:, 0].abs(), levels[:, -1].abs())
    exponent = (largest.view(torch.int32) >> 23).clamp(min=1)
    factor = ((255 - exponent) << 23).view(torch.float32)
    factor = torch.where(largest > 0, factor, 0.0)
    scaled = levels * factor.unsqueeze(1)
    gaps = (scaled[:, 1:] - scaled[:, :-1]) * 2.0**-24

    n = flat.numel()
    x = flat * per_coordinate(factor, n, bucket_size)
    integers = uniforms(n, bucket_size, key, flat.device).to(torch.int64) | 1
    u = integers.to(torch.float32)
    codes = torch.zeros(n, dtype=torch.int64, device=flat.device)
    for lower, gap in zip(scaled[:, :-1].unbind(1), gaps.unbind(1), strict=True):
        distance = x - per_coordinate(lower, n, bucket_size)
        codes += distance > u * per_coordinate(gap, n, bucket_size)
    words.copy_(pack_codes(codes, packing_of(levels.shape[1])))


def cut_codes(
    flat: torch.Tensor, cuts: torch.Tensor, words: torch.Tensor, bucket_size: int
) -> None:
    """Pack one bit for each coordinate, [v >= the bucket's cut] (Eq. 16), into ``words``."""
    codes = flat >= per_coordinate(cuts, flat.numel(), bucket_size)
    words.copy_(pack_codes(codes.to(torch.int64), packing_of(2)))


def decode_add(
    payloads: Sequence[tuple[torch.Tensor, torch.Tensor]],
    bucket_size: int,
    factor: float,
    out: torch.Tensor,
) -> None:
    """Set out (float32, (n,)) to factor * (out + the payloads' values, added in order). A payload
    is its (values float32 (buckets, alphabet), words int32). A code that no encoder makes is
    decoded as NaN.
    """
    n = out.numel()
    of = torch.arange(n, device=out.device) // bucket_size
    for values, words in payloads:
        packing = packing_of(values.shape[1])
        out += padded_values(values, packing)[of, unpack_codes(words, n, packing)]
    if factor != 1.0:
        out *= factor
