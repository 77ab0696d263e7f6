"""Define LevelScheme, the interface of schemes with one level table to a user."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from hvd_adaptive.codec.adaptive_codec import AdaptiveCodec
from hvd_adaptive.compressor import GradientCompressor


class LevelScheme(GradientCompressor):
    """Base of schemes whose buckets share one level table."""

    @property
    def codec(self) -> AdaptiveCodec:
        return cast(AdaptiveCodec, super().codec)

    @property
    def levels(self) -> torch.Tensor:
        """Return the ascending signed reconstruction levels in [-1, 1], float64."""
        return self.codec.levels

    @property
    def table_version(self) -> int:
        """Return how often the default part's table was fitted."""
        return self.codec.table_version

    def fit(self, gradients: torch.Tensor | Sequence[torch.Tensor]) -> None:
        """Refit table and code book from gradients, in this process alone.

        If there are other parts, this refits the default part's; ``part(label).fit`` refits theirs.

        Args:
            gradients: A tensor or a list of tensors of any shapes, concatenated as in training. All
                buckets that would be quantised are used, except for non-finite and zero buckets.

        Raises:
            ValueError: No bucket is finite and nonzero.

        Examples:
            >>> from hvd_adaptive import ALQ
            >>> compressor = ALQ(bits=3)
            >>> compressor.fit([torch.randn(100, 100), torch.randn(10_000)])
            >>> compressor.levels.numel()
            7
        """
        self.codec.fit(gradients)
