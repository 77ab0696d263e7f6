"""Implement BinGrad: two levels per bucket, partially biased or biased (ORQ paper, section 3.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from hvd_adaptive.base.checks import check_choice, check_flag
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

# Numbers sent for each bucket.
NUMBERS = {"partially_biased": 1, "biased": 2}


class BinGrad(GradientCompressor):
    """Binary gradients with the best two levels (Xu, Huo, Huang 2020, section 3.2).

    Clipped coordinates (clip=2.5) enter the levels clipped.

    Args:
        variant: "partially_biased" (BinGrad-pb) uses the levels -b_1 and b_1. A coordinate beyond
            them becomes the nearer one. A coordinate between them, b_-1 < v <= b_1 (reversed in the
            printed Eq. 14), is rounded at random without bias. b_1 solves Eq. 15, n b_1 = sum_{|v|
            > b_1} |v|, which assumes a law symmetric about zero; its squared error is within 1 % of
            the least among such levels. One number is sent. "biased" (BinGrad-b, Eq. 16) uses b_1
            for v >= b_0 and b_-1 for the others, without randomness. b_0 is the bucket's mean, and
            b_-1 and b_1 are the means on its two sides (Eq. 17). Two numbers are sent.
        iterate: For "biased", repeat b_0 = (b_-1 + b_1)/2 until all of Eq. 17 holds; no repetition
            raises the error.
        **shared: See ``hvd_adaptive.settings.Settings``.

    Raises:
        ValueError: A keyword is wrong.

    Examples:
        >>> from hvd_adaptive import BinGrad
        >>> compressor = BinGrad(variant="biased", error_feedback="auto")
        >>> decoded = compressor.decode(compressor.encode(torch.randn(8192)))
        >>> decoded.unique().numel()
        2
    """

    def __init__(
        self,
        *,
        variant: Literal["partially_biased", "biased"] = "partially_biased",
        iterate: bool = False,
        **shared: Unpack[Shared],
    ) -> None:
        check_choice("variant", variant, tuple(NUMBERS))
        check_flag("iterate", iterate)
        if iterate and variant != "biased":
            raise ValueError(f"iterate={iterate!r}: must be False unless variant='biased'")
        settings = Settings.from_keywords(BinGrad, shared)
        super().__init__(_Codec(settings, variant, iterate))


class _Codec(BucketCodec):
    name = "bingrad"

    def __init__(self, settings: Settings, variant: str, iterate: bool) -> None:
        super().__init__(settings, alphabet=2, numbers=NUMBERS[variant])
        self.variant, self.iterate = variant, iterate

    def codec_settings(self) -> dict[str, Any]:
        return {"variant": self.variant}

    def scheme_settings(self) -> dict[str, Any]:
        return self.codec_settings() | {"iterate": self.iterate}

    def quantize_buckets(
        self, flat: torch.Tensor, words: torch.Tensor, bucket_size: int, key: int
    ) -> torch.Tensor:
        levels, codes, clip = level_kernels(flat), code_kernels(flat), self.settings.clip
        if self.variant == "biased":
            means = levels.conditional_means(flat, bucket_size, clip, self.iterate)
            codes.cut_codes(flat, means[:, 2].contiguous(), words, bucket_size)
            return means[:, :2]
        numbers = levels.symmetric_levels(flat, bucket_size, clip)
        codes.round_codes(flat, self.values(numbers), words, bucket_size, key)
        return numbers

    def values(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers if self.variant == "biased" else mirrored(numbers)
