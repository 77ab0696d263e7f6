"""Implement scaled SignSGD: a bit per coordinate and a number per bucket (ORQ paper, Eq. 13)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hvd_adaptive.codec.bucket_codec import (
    BucketCodec,
    code_kernels,
    level_kernels,
    mirrored,
)
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.settings import Settings

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from hvd_adaptive.shared_keywords import Shared


class SignSGD(GradientCompressor):
    """Scaled SignSGD (Xu, Huo, Huang 2020, Eq. 13): signs times the mean of |v| over the bucket.

    The result is biased and not random. The scale has the least squared error for signs. One bit
    cannot represent sign(0) = 0, so a zero counts as positive; a bucket of zeros alone stays zero.

    Args:
        **shared: See ``hvd_adaptive.settings.Settings``.

    Examples:
        >>> from hvd_adaptive import SignSGD
        >>> compressor = SignSGD(error_feedback="auto")
        >>> compressor.decode(compressor.encode(torch.tensor([3.0, -1.0, 2.0])))
        tensor([ 2., -2.,  2.])
    """

    def __init__(self, **shared: Unpack[Shared]) -> None:
        settings = Settings.from_keywords(SignSGD, shared)
        super().__init__(_Codec(settings, alphabet=2, numbers=1))


class _Codec(BucketCodec):
    name = "signsgd"

    def codec_settings(self) -> dict[str, Any]:
        return {}

    def quantize_buckets(
        self, flat: torch.Tensor, words: torch.Tensor, bucket_size: int, key: int
    ) -> torch.Tensor:
        scales = level_kernels(flat).mean_magnitudes(flat, bucket_size, self.settings.clip)
        code_kernels(flat).cut_codes(flat, torch.zeros_like(scales[:, 0]), words, bucket_size)
        return scales

    def values(self, numbers: torch.Tensor) -> torch.Tensor:
        return mirrored(numbers)
