"""Implement OneBitSGD: a sign, and the mean of each side (Seide et al. 2014)."""

from __future__ import annotations

from typing import Any, Literal

import torch
from typing_extensions import Unpack

from hvd_adaptive import kernels
from hvd_adaptive.codec.bucket_codec import BucketCodec
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.settings import Settings, WithClip


class OneBitSGD(GradientCompressor):
    """1-bit SGD (Seide, Fu, Droppo, Li, Yu, Interspeech 2014, section 3.2).

    One bit encodes the side of zero on which a coordinate lies (zero counts as positive). The
    coordinate is decoded as the mean of its side over the bucket; the paper uses a column of a
    weight matrix instead of a bucket. These are the two values with the least squared error for
    this threshold. The error is the variance within the sides, Σ v_i² - n₋ m₋² - n₊ m₊², which
    never exceeds the gradient's square. The sum over a bucket is preserved. Nothing is random, and
    the result is biased.

    A bucket with NaN or Inf becomes NaN.

    Args:
        error_feedback: Weight of the residual that is carried to the next step. 1.0 is the paper's
            value, which makes one bit sufficient; None disables error feedback, and "auto" adapts
            the weight to the error.
        **shared: See ``hvd_adaptive.settings.Settings``.

    Examples:
        >>> from hvd_adaptive import OneBitSGD
        >>> compressor = OneBitSGD()
        >>> compressor.decode(compressor.encode(torch.tensor([3.0, -1.0, 2.0])))
        tensor([ 2.5000, -1.0000,  2.5000])
    """

    def __init__(
        self, *, error_feedback: float | Literal["auto"] | None = 1.0, **shared: Unpack[WithClip]
    ) -> None:
        keywords = {**shared, "error_feedback": error_feedback}
        settings = Settings.from_keywords(OneBitSGD, keywords)
        super().__init__(_Codec(settings, alphabet=2, numbers=2))


class _Codec(BucketCodec):
    name = "onebit"

    def codec_settings(self) -> dict[str, Any]:
        return {}

    def quantize_buckets(
        self, flat: torch.Tensor, words: torch.Tensor, bucket_size: int, key: int
    ) -> torch.Tensor:
        ops = kernels.for_device(flat.device, "onebit")
        means = flat.new_empty(self._buckets(flat.numel()), 2)
        ops.encode(self._clipped(flat), means, words, bucket_size)
        return means
