"""Compress naturally in plain torch: the oracle for the fast kernels.

A coordinate's code is the exponent field of a float32 and a sign bit. Exponents 1 to 254 are the
powers 2**-126 to 2**127, 0 is zero and 255 is the largest finite float32, which replaces 2**128.
Exponent 0 with the sign bit set is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_adaptive.kernels.constants import LARGEST, MASK32
from hvd_adaptive.kernels.packing import ONE_BIT
from hvd_adaptive.kernels.reference.codes import pack_codes, unpack_codes
from hvd_adaptive.kernels.reference.tables import bucket_norms, per_coordinate
from hvd_adaptive.kernels.reference.uniforms import uniforms


def encode(
    flat: torch.Tensor, exponents: torch.Tensor, words: torch.Tensor, bucket_size: int, key: int
) -> None:
    """Round ``flat`` (float32, (n,)) to powers of two, at random and without bias.

    Fill ``exponents`` (uint8, (n,)) and ``words`` (int32, the packed sign bits). The 23 bits of the
    mantissa are the probability of the upper power. For a denormal, whose exponent field is 0, the
    two powers are 2**-126 and 0, and the same holds. Buckets with NaN or Inf become NaN.
    """
    bits = flat.view(torch.int32).to(torch.int64) & MASK32
    up = uniforms(flat.numel(), bucket_size, key, flat.device) < (bits << 1 & 0xFFFFFF)
    exponent = (bits >> 23 & 0xFF) + up
    signs = torch.where(exponent == 0, 0, bits >> 31)
    norms = bucket_norms(flat, bucket_size, "linf")  # NaN if a coordinate is not finite
    broken = per_coordinate(norms.isnan(), flat.numel(), bucket_size)
    exponents.copy_(torch.where(broken, 0, exponent))
    words.copy_(pack_codes(torch.where(broken, 1, signs), ONE_BIT))


def decode_add(
    payloads: Sequence[tuple[torch.Tensor, torch.Tensor]], factor: float, out: torch.Tensor
) -> None:
    """Set out (float32, (n,)) to factor * (out + the payloads' values, added in order). A payload
    is its (exponents uint8, words int32).
    """
    for exponents, words in payloads:
        exponent = exponents.to(torch.int64)
        bits = torch.where(exponent == 255, LARGEST, exponent << 23)
        magnitudes = bits.to(torch.int32).view(torch.float32)
        negative = unpack_codes(words, out.numel(), ONE_BIT) == 1
        values = torch.where(negative, -magnitudes, magnitudes)
        out += torch.where(negative & (exponent == 0), torch.nan, values)
    if factor != 1.0:
        out *= factor
