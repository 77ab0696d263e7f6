"""Define the interface of fitted schemes, and of those with one level table, to a user."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvd_adaptive.compressor import GradientCompressor


class FittedScheme(GradientCompressor):
    """Base of schemes that are fitted to gradients."""

    _codec: Any

    def fit(self, gradients: torch.Tensor | Sequence[torch.Tensor]) -> None:
        """Refit the levels, step or code book from gradients, in this process alone.

        This refits the default part; ``parts[label].fit`` refits another one.

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
        self._codec.fit(gradients)


class LevelScheme(FittedScheme):
    """Base of schemes whose buckets share one level table."""

    @property
    def levels(self) -> torch.Tensor:
        """Return the ascending signed reconstruction levels in [-1, 1], float64."""
        return self._codec.levels
