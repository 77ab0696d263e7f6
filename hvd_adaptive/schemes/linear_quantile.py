"""Implement LinearQuantile: levels at equal steps of the empirical law (ORQ paper, section 5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from hvd_adaptive.base.checks import check_integer
from hvd_adaptive.codec.bucket_codec import RandomRounding, level_kernels
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.settings import Settings

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from hvd_adaptive.shared_keywords import Shared


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

    Raises:
        ValueError: A keyword is wrong.

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
        super().__init__(_Codec(settings, levels, levels, level_dtype))


class _Codec(RandomRounding):
    name = "linear_quantile"

    def codec_settings(self) -> dict[str, Any]:
        return {"levels": self.alphabet, "level_dtype": self.level_dtype}

    def solve(self, flat: torch.Tensor, bucket_size: int) -> torch.Tensor:
        return level_kernels(flat).quantile_levels(
            flat, bucket_size, self.alphabet, self.settings.clip
        )
