"""Compress naturally in Triton, on the bits of the floats.

Signatures and integers are the same as in reference/natural.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from hvd_adaptive.kernels.constants import LARGEST, NAN
from hvd_adaptive.kernels.packing import ONE_BIT
from hvd_adaptive.kernels.triton.decoder import unpack_add
from hvd_adaptive.kernels.triton.encoder import pack
from hvd_adaptive.kernels.triton.random import integer24
from hvd_adaptive.kernels.triton.scan import bucket_norms

_LARGEST, _NAN = tl.constexpr(LARGEST), tl.constexpr(NAN)
# Buckets do not matter to the decoder.
_ANY_BUCKET = 512


def encode(
    flat: torch.Tensor,
    exponents: torch.Tensor,
    words: torch.Tensor,
    bucket_size: int,
    key: int,
    summing: bool = False,
) -> None:
    """See reference.natural.encode."""
    state = (bucket_norms(flat, bucket_size, "linf"), exponents)
    pack(
        flat,
        words,
        bucket_size,
        ONE_BIT,
        key,
        state,
        PREPARE=_broken,
        CODE=_round,
        RULE=_round,
        OPTIONS=(),
    )


def decode_add(
    payloads: Sequence[tuple[torch.Tensor, torch.Tensor]], factor: float, out: torch.Tensor
) -> None:
    """See reference.natural.decode_add."""
    for exponents, words in payloads:
        if exponents.numel() < out.numel() or words.numel() < ONE_BIT.words(out.numel()):
            raise ValueError(
                f"payload of {exponents.numel()} exponents, {words.numel()} words is too short"
            )
    unpack_add(payloads, _ANY_BUCKET, ONE_BIT, factor, out, True, (out,), VALUE=_power)


@triton.jit
def _broken(bucket, there, state, OPTIONS: tl.constexpr):
    """Return whether a bucket holds a NaN or Inf."""
    norm = tl.load(state[0] + bucket, mask=there, other=0.0)
    return (norm != norm,)


@triton.jit
def _round(v, counter, high, about, state, i, there, rule: tl.constexpr, OPTIONS: tl.constexpr):
    """Return sign bits; store the exponents."""
    bits = v.to(tl.uint32, bitcast=True)
    up = integer24(counter, high) < ((bits << 1) & 0xFFFFFF).to(tl.int32)
    exponent = ((bits >> 23) & 0xFF) + up.to(tl.uint32)
    sign = tl.where(exponent == 0, 0, bits >> 31)
    tl.store(state[1] + i, tl.where(about[0], 0, exponent).to(tl.uint8), mask=there)
    return tl.where(about[0], 1, sign)


@triton.jit
def _power(code, bucket, i, there, exponents, state, OPTIONS: tl.constexpr):
    exponent = tl.load(exponents + i, mask=there, other=0).to(tl.int32)
    bits = tl.where(exponent == 255, _LARGEST, exponent << 23)
    bits = tl.where((exponent == 0) & (code == 1), _NAN, bits | (code << 31))
    return bits.to(tl.float32, bitcast=True)
