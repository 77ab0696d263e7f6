"""Make gradients from random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def heavy_tailed(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Return normal numbers whose scales are log-normal (float32)."""
    scales = torch.randn(tuple(shape), generator=generator).mul_(0.5).exp_()
    return torch.randn(tuple(shape), generator=generator).mul_(scales).mul_(1e-2)
