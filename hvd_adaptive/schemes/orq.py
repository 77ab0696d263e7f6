"""Implement ORQ, BinGrad, LinearQuantile and SignSGD: the methods of the ORQ paper (2020)."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Literal

import torch
from typing_extensions import Unpack

from hvd_adaptive import kernels
from hvd_adaptive.base.checks import check_choice, check_flag, check_integer, is_whole
from hvd_adaptive.codec.bucket_codec import BucketCodec
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.settings import Settings, Shared

ALLOWED_LEVELS = (3, 5, 9, 17, 33, 65, 129)
# Most rounds of coordinate descent after the greedy levels.
SWEEPS = {"greedy": 0, "coordinate_descent": 30}
# Numbers sent for each bucket.
NUMBERS = {"partially_biased": 1, "biased": 2}


class ORQ(GradientCompressor):
    """Optimized random quantization (Xu, Huo, Huang: Optimal Gradient Quantization Condition for
    Communication-Efficient Distributed Training, 2020).

    Each bucket is rounded at random, without bias (Eq. 7), to levels that its own coordinates
    determine: the least and the largest (Corollary 1.1), and between two levels, by halving
    (Algorithm 1), the coordinate that leaves the least variance. With a = b_k-1 and c = b_k+1 the
    variance sum (v-a)(b-v) + sum (v-b)(c-v) is convex, and linear in b between coordinates. Its
    slope changes sign at the coordinate with #{v >= b} = sum (v-a) / (c-a). This is Eq. 12, whose
    closed intervals as printed count coordinates equal to b on both sides. Therefore a bucket is
    sorted (by radix, exactly) and each level is a rank.

    A bucket with a coordinate that is not finite decodes to NaN, and one whose coordinates are all
    below 2**-126 to zeros. Coordinates equal to a level (all those of a constant bucket) are exact.

    Args:
        levels: 2**K + 1, K from 1 to 7; default 9.
        solver: "greedy", or "coordinate_descent". The latter starts from the greedy levels and sets
            each inner level in turn to the best between its neighbours, until none moves, at most
            30 times. Its variance is never larger, and every level then satisfies Eq. 12 (after
            halving, only the last levels do).
        level_dtype: "float32"; or "float16", with 2 bytes per level and one per bucket, which
            rounds the least level down and the largest up.
        **shared: See ``hvd_adaptive.settings.Settings``. The paper clips at 2.5 or 1.7 deviations
            (clip=2.5).

    Examples:
        >>> from hvd_adaptive import ORQ
        >>> compressor = ORQ(levels=9)
        >>> decoded = compressor.decode(compressor.encode(torch.randn(8192)))
        >>> decoded.unique().numel()
        9
    """

    def __init__(
        self,
        *,
        levels: int = 9,
        solver: Literal["greedy", "coordinate_descent"] = "greedy",
        level_dtype: Literal["float32", "float16"] = "float32",
        **shared: Unpack[Shared],
    ) -> None:
        if not is_whole(levels) or levels not in ALLOWED_LEVELS:
            raise ValueError(
                f"levels={levels!r}: must be one of {', '.join(map(str, ALLOWED_LEVELS))}"
            )
        check_choice("solver", solver, tuple(SWEEPS))
        settings = Settings.from_keywords(ORQ, shared)
        super().__init__(_ORQCodec(settings, int(levels), solver, level_dtype))


class _RandomCodec(BucketCodec):
    """Base of codecs that round at random, without bias, to neighbouring levels (Eq. 7)."""

    def codec_settings(self) -> dict[str, Any]:
        return {"levels": self.alphabet, "level_dtype": self.level_dtype}

    def quantize_buckets(
        self, flat: torch.Tensor, words: torch.Tensor, bucket_size: int, key: int
    ) -> torch.Tensor:
        levels = self._format.rounded(self.solve(flat, bucket_size))
        ops = kernels.for_device(flat.device, "bucket")
        ops.round_codes(flat, levels, words, bucket_size, key)
        return levels

    @abstractmethod
    def solve(self, flat: torch.Tensor, bucket_size: int) -> torch.Tensor:
        """Return the levels of each bucket, float32 (buckets, levels)."""


class _ORQCodec(_RandomCodec):
    name = "orq"

    def __init__(self, settings: Settings, levels: int, solver: str, level_dtype: str) -> None:
        super().__init__(settings, levels, levels, level_dtype)
        self.solver = solver

    def scheme_settings(self) -> dict[str, Any]:
        return self.codec_settings() | {"solver": self.solver}

    def solve(self, flat: torch.Tensor, bucket_size: int) -> torch.Tensor:
        solve = kernels.for_device(flat.device, "levels").orq_levels
        return solve(flat, bucket_size, self.alphabet, self.settings.clip, SWEEPS[self.solver])


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
        super().__init__(_BinGradCodec(settings, variant, iterate))


class _BinGradCodec(BucketCodec):
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
        levels, codes = (kernels.for_device(flat.device, of) for of in ("levels", "bucket"))
        clip = self.settings.clip
        if self.variant == "biased":
            means = levels.conditional_means(flat, bucket_size, clip, self.iterate)
            codes.cut_codes(flat, means[:, 2].contiguous(), words, bucket_size)
            return means[:, :2]
        numbers = levels.symmetric_levels(flat, bucket_size, clip)
        codes.round_codes(flat, self.values(numbers), words, bucket_size, key)
        return numbers


class LinearQuantile(GradientCompressor):
    """Linear-s, ORQ's comparison (Xu, Huo, Huang 2020): levels are equidistant quantiles.

    Level k of s is the quantile k/(s-1) of the bucket. Quantiles between coordinates are
    interpolated linearly. Coordinates are rounded at random, without bias (Eq. 7). Most levels lie
    near zero, where most coordinates are, and few where most of the variance arises. This scheme is
    a baseline, not a recommendation.

    Args:
        levels: 2 to 256; default 9.
        level_dtype: As in ORQ.
        **shared: See ``hvd_adaptive.settings.Settings``.

    Examples:
        >>> from hvd_adaptive import LinearQuantile
        >>> compressor = LinearQuantile(levels=9)
        >>> decoded = compressor.decode(compressor.encode(torch.randn(8192)))
        >>> decoded.unique().numel()
        9
    """

    def __init__(
        self,
        *,
        levels: int = 9,
        level_dtype: Literal["float32", "float16"] = "float32",
        **shared: Unpack[Shared],
    ) -> None:
        levels = check_integer("levels", levels, 2, 256)
        settings = Settings.from_keywords(LinearQuantile, shared)
        super().__init__(_QuantileCodec(settings, levels, levels, level_dtype))


class _QuantileCodec(_RandomCodec):
    name = "linear_quantile"

    def solve(self, flat: torch.Tensor, bucket_size: int) -> torch.Tensor:
        solve = kernels.for_device(flat.device, "levels").quantile_levels
        return solve(flat, bucket_size, self.alphabet, self.settings.clip)


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
        super().__init__(_SignCodec(Settings.from_keywords(SignSGD, shared), alphabet=2, numbers=1))


class _SignCodec(BucketCodec):
    name = "signsgd"

    def codec_settings(self) -> dict[str, Any]:
        return {}

    def quantize_buckets(
        self, flat: torch.Tensor, words: torch.Tensor, bucket_size: int, key: int
    ) -> torch.Tensor:
        levels, codes = (kernels.for_device(flat.device, of) for of in ("levels", "bucket"))
        scales = levels.mean_magnitudes(flat, bucket_size, self.settings.clip)
        codes.cut_codes(flat, torch.zeros_like(scales[:, 0]), words, bucket_size)
        return scales
