"""Implement ORQ: optimized random quantization (2020)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from hvd_adaptive.base.checks import check_choice, is_whole
from hvd_adaptive.codec.bucket_codec import RandomRounding, level_kernels
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.settings import Settings

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from hvd_adaptive.shared_keywords import Shared

ALLOWED_LEVELS = (3, 5, 9, 17, 33, 65, 129)
# Most rounds of coordinate descent after the greedy levels.
SWEEPS = {"greedy": 0, "coordinate_descent": 30}


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

    Raises:
        ValueError: A keyword is wrong.

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
        super().__init__(_Codec(settings, int(levels), solver, level_dtype))


class _Codec(RandomRounding):
    name = "orq"

    def __init__(self, settings: Settings, levels: int, solver: str, level_dtype: str) -> None:
        super().__init__(settings, levels, levels, level_dtype)
        self.solver = solver

    def codec_settings(self) -> dict[str, Any]:
        return {"levels": self.alphabet, "level_dtype": self.level_dtype}

    def scheme_settings(self) -> dict[str, Any]:
        return self.codec_settings() | {"solver": self.solver}

    def solve(self, flat: torch.Tensor, bucket_size: int) -> torch.Tensor:
        return level_kernels(flat).orq_levels(
            flat, bucket_size, self.alphabet, self.settings.clip, SWEEPS[self.solver]
        )
