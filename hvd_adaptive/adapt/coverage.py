"""How much of the sampled buckets has a gradient: a table fitted to little is fitted again soon."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hvd_adaptive import kernels
from hvd_adaptive.device import Later

# Numbers of ``Usable.head``, which codecs' statistics begin with.
HEAD = 4
# A fit is complete where at most this share of the sampled coordinates is zero, and is worth
# repeating where the share of the others has grown by so much.
ZEROS, GROWTH = 0.05, 1.05


def share_in(state: Mapping[str, Any]) -> float:
    """``Coverage.share`` of the last fit, as a codec's state holds it: 0 in one from before it did.
    ValueError where it is no share."""
    share = state.get("share", 0.0)
    real = isinstance(share, int | float) and not isinstance(share, bool)
    if not real or not (math.isfinite(share) and 0 <= share <= 1):
        raise ValueError(f"state: share must be a number from 0 to 1, not {share!r}")
    return float(share)


@dataclass(frozen=True)
class Usable:
    """The finite, non-zero ones among sampled buckets, their norms and weights (statistics.py).

    head: float64 [usable buckets, buckets, nonzero coordinates of the usable ones, coordinates],
        the last two with the buckets' weights.
    """

    buckets: list[torch.Tensor]
    norms: list[float]
    weights: list[float]
    head: np.ndarray

    @classmethod
    def among(cls, buckets: Sequence[torch.Tensor], weights: Sequence[float], norm: str) -> Usable:
        """Of buckets (float32, 1-D); one copy to the host."""
        found = list(zip(buckets, *_norms_and_nonzero(buckets, norm), weights, strict=True))
        used = [each for each in found if each[1] > 0]  # false for NaN
        nonzero = sum(count * weight for _, _, count, weight in used)
        coordinates = sum(bucket.numel() * weight for bucket, _, _, weight in found)
        return cls(
            [bucket for bucket, _, _, _ in used],
            [norm for _, norm, _, _ in used],
            [weight for _, _, _, weight in used],
            np.array([len(used), len(found), nonzero, coordinates], np.float64),
        )


def _norms_and_nonzero(
    buckets: Sequence[torch.Tensor], norm: str
) -> tuple[list[float], list[float]]:
    """Of each bucket its norm, and how many coordinates are not zero."""
    if not buckets:
        return [], []
    ops = kernels.for_device(buckets[0].device)
    norms = torch.cat([ops.bucket_norms(bucket, bucket.numel(), norm) for bucket in buckets])
    counts = torch.stack([bucket.count_nonzero() for bucket in buckets])
    both = torch.stack([norms.to(torch.float64), counts.to(torch.float64)])
    of_norms, of_counts = Later(both).get().tolist()
    return of_norms, of_counts


@dataclass(frozen=True)
class Coverage:
    """What the samples of all ranks hold.

    found: usable buckets (finite and not zero) of those ``sampled``.
    share: of their coordinates those that are usable and not zero. At a first step whole tensors
        may have no gradient yet (the A of a LoRA adapter whose B is zero), and lie in one bucket
        with others that have.
    """

    found: float
    sampled: float
    share: float

    @classmethod
    def of(cls, collected: Sequence[np.ndarray]) -> Coverage:
        """From the ranks' vectors, which begin with ``Usable.head``."""
        found, sampled, nonzero, coordinates = np.sum([own[:HEAD] for own in collected], axis=0)
        return cls(found, sampled, float(nonzero / coordinates) if coordinates else 0.0)

    @property
    def complete(self) -> bool:
        """Whether a fit need not be repeated soon."""
        return bool(self.found == self.sampled > 0) and self.share >= 1 - ZEROS

    def has_grown(self, share: float) -> bool:
        """Whether a fit to these samples is worth while after one to samples of that share; 0 where
        none could be made."""
        return self.share > GROWTH * share
