"""Implement NaturalCompression: rounding to powers of two (Horváth et al. 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import Unpack

from hvd_adaptive import kernels
from hvd_adaptive.codec.adaptive_codec import PlainCodec
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.kernels.packing import ONE_BIT
from hvd_adaptive.settings import Settings, Shared


class NaturalCompression(GradientCompressor):
    """Natural compression (Horváth, Ho, Horváth, Sahu, Canini, Richtárik 2019).

    Each coordinate is rounded to one of its two neighbouring powers of two, at random and without
    bias (their C_nat). For 2**a <= |t| <= 2**(a + 1) the upper one has probability |t|/2**a - 1,
    which is given by the mantissa's bits. Then E(C(t) - t)² = (|t| - 2**a)(2**(a + 1) - |t|), at
    most t²/8 (at |t| = 4/3 2**a): the variance is at most 1/8 of the squared norm (their ω). There
    is no norm and no table. Nine bits are sent for each coordinate: the exponent (8) and the sign.

    Powers are float32's:

    - Below 2**-126 a coordinate becomes 0 or 2**-126, without bias, but with a relative variance
      that exceeds 1/8. Zeros stay zeros.
    - From 2**127 on the upper neighbour would be 2**128, which float32 cannot hold. It decodes to
      the largest float32 instead, which is 2**-24 less; the mean equals the coordinate within its
      last bit.
    - Gradients in float16 and bfloat16 overflow in their own format: values of at least half of
      their largest finite value may be rounded up to Inf when the sum is cast back.

    Args:
        **shared: See ``hvd_adaptive.settings.Settings``. ``bucket_size`` matters for ``clip``, for
            ``tail``, and for NaN, which makes its whole bucket NaN.

    Examples:
        >>> from hvd_adaptive import NaturalCompression
        >>> compressor = NaturalCompression()
        >>> decoded = compressor.decode(compressor.encode(torch.full((8192,), 3.0)))
        >>> decoded.unique()
        tensor([2., 4.])
    """

    def __init__(self, **shared: Unpack[Shared]) -> None:
        super().__init__(_Codec(Settings.from_keywords(NaturalCompression, shared)))


class _Codec(PlainCodec):
    name = "natural"
    alphabet = 512
    has_zero = True

    def codec_settings(self) -> dict[str, Any]:
        return {}

    def body_bytes(self, coordinates: int) -> int:
        return _exponent_bytes(coordinates) + 4 * ONE_BIT.words(coordinates)

    def encode_body(self, flat: torch.Tensor, body: torch.Tensor, key: int) -> None:
        flat, bucket = self._clipped(flat), self._bucket(flat.numel())
        body[flat.numel() : _exponent_bytes(flat.numel())] = 0
        exponents, words = _split(body, flat.numel())
        ops = kernels.for_device(flat.device, "natural")
        ops.encode(flat, exponents, words, bucket, key)

    def add_bodies(
        self, bodies: Sequence[torch.Tensor], keys: Sequence[int], factor: float, out: torch.Tensor
    ) -> None:
        pairs = [_split(body, out.numel()) for body in bodies]
        kernels.for_device(out.device, "natural").decode_add(pairs, factor, out)


def _exponent_bytes(coordinates: int) -> int:
    return -(-coordinates // 4) * 4


def _split(body: torch.Tensor, coordinates: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return exponents and sign words."""
    return body[:coordinates], body[_exponent_bytes(coordinates) :].view(torch.int32)
