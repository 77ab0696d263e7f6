"""LinearQuantile: levels at equal steps of the empirical distribution (ORQ paper, section 5)."""

from __future__ import annotations

from typing import Any

import torch

from hvd_adaptive.schemes.bucket_table_scheme import RandomRounding, level_kernels
from hvd_adaptive.settings import Settings, check_integer


class LinearQuantile(RandomRounding):
    """Linear-s, the ORQ paper's comparison: level k of s is the quantile k/(s-1) of the bucket.

    Extremes are the bucket's own, quantiles between coordinates are interpolated linearly, and
    coordinates are rounded at random, without bias (Eq. 7). Most levels lie where most coordinates
    do, near zero, and few where the variance is made: it is a baseline, not a recommendation.

    levels: 2 to 256; default 9.
    level_dtype, shared: see ORQ.
    """

    name = "linear_quantile"

    def __init__(self, *, levels: int = 9, level_dtype: str = "float32", **shared: Any) -> None:
        levels = check_integer("levels", levels, 2, 256)
        settings = Settings.from_keywords("LinearQuantile", shared)
        super().__init__(settings, levels, levels, level_dtype)

    def codec_settings(self) -> dict[str, Any]:
        return {"levels": self.alphabet, "level_dtype": self.level_dtype}

    def solve(self, flat: torch.Tensor, bucket_size: int) -> torch.Tensor:
        return level_kernels(flat).quantile_levels(
            flat, bucket_size, self.alphabet, self.settings.clip
        )
