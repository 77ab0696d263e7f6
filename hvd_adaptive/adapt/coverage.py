"""Measure how much of the sampled buckets has a gradient: fits to little are repeated soon."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hvd_adaptive import kernels
from hvd_adaptive.adapt.statistics import weights_of
from hvd_adaptive.base.checks import is_real
from hvd_adaptive.base.tensors import stacked
from hvd_adaptive.coding.zeros import Zeros

# Length of ``Usable.head``, with which codecs' statistics begin.
HEAD = 6
# A fit is complete if at most the share ZEROS of the sampled coordinates is zero. It is worth
# repeating if the share of the others has grown by the factor GROWTH.
ZEROS, GROWTH = 0.05, 1.05


def share_in(state: Mapping[str, Any]) -> float:
    """Return the last fit's share in a state, 0 if it has none; raise ValueError if it is wrong."""
    share = state.get("share", 0.0)
    if not is_real(share) or not 0 <= share <= 1:
        raise ValueError(f"state: share must be a number from 0 to 1, not {share!r}")
    return float(share)


@dataclass(frozen=True)
class Usable:
    """Finite, nonzero buckets among the sampled ones, with their norms and weights (statistics.py).

    Attributes:
        head: float64 [usable buckets, buckets, buckets that are not finite, nonzero coordinates of
            the usable ones, coordinates, bits that say where zeros are among the first]; the last
            three are weighted.
    """

    buckets: list[torch.Tensor]
    norms: list[float]
    weights: list[float]
    head: np.ndarray

    @classmethod
    def among(
        cls,
        buckets: Sequence[torch.Tensor],
        norm: str,
        clip: Callable[[torch.Tensor], torch.Tensor],
        without_zeros: bool,
    ) -> Usable:
        """Return the usable ones among buckets (float32, 1-D), clipped by a function, with one copy
        to the host.

        Quantised buckets may be ``without_zeros`` (coding/zeros.py). A bucket with zeros is then
        replaced by its other coordinates, repeated up to its size, because in a payload their
        neighbours follow them. Its weight becomes less in proportion, and a second copy to the host
        is made.
        """
        usable, weights = [clip(bucket) for bucket in buckets], weights_of(buckets)
        norms, nonzero = _norms_and_nonzero(usable, norm)
        places = [at for at, own in enumerate(norms) if own > 0]  # false for NaN
        lost = sum(map(math.isnan, norms))
        some = sum(nonzero[at] * weights[at] for at in places)
        total = sum(bucket.numel() * w for bucket, w in zip(usable, weights, strict=True))
        head = np.array([len(places), len(norms), lost, some, total, 0], np.float64)
        sparse = [at for at in places if without_zeros and nonzero[at] < usable[at].numel()]
        filled = [clip(_filled(buckets[at])) for at in sparse]
        filled_norms, _ = _norms_and_nonzero(filled, norm)
        for at, bucket, own in zip(sparse, filled, filled_norms, strict=True):
            if (zeros := Zeros.of(buckets[at])) is not None:
                head[-1] += weights[at] * 8 * zeros.stream().numel()
            if math.isfinite(own):  # the norm of repeated coordinates may overflow
                weights[at] = weights[at] * nonzero[at] / bucket.numel()
                usable[at], norms[at] = bucket, own
        return cls(
            [usable[at] for at in places],
            [norms[at] for at in places],
            [weights[at] for at in places],
            head,
        )


def _filled(bucket: torch.Tensor) -> torch.Tensor:
    """Return the nonzero coordinates of a bucket, repeated up to its size."""
    others = bucket[bucket != 0]
    return others.repeat(math.ceil(bucket.numel() / others.numel()))[: bucket.numel()]


def _norms_and_nonzero(
    buckets: Sequence[torch.Tensor], norm: str
) -> tuple[list[float], list[float]]:
    """Return the norm and the number of nonzero coordinates of each bucket."""
    if not buckets:
        return [], []
    ops = kernels.for_device(buckets[0].device)
    norms = torch.cat([ops.bucket_norms(bucket, bucket.numel(), norm) for bucket in buckets])
    counts = torch.stack([bucket.count_nonzero() for bucket in buckets])
    norms, counts = stacked([norms.to(torch.float64), counts.to(torch.float64)]).get()
    return norms.tolist(), counts.tolist()


@dataclass(frozen=True)
class Coverage:
    """Contents of the samples of all ranks: numbers of usable (finite and nonzero) buckets found,
    of sampled ones, and of those lost, which are not finite.

    Attributes:
        share: Share of the coordinates that are usable and nonzero. At the first step whole tensors
            may have no gradient yet (such as the A of a LoRA adapter whose B is zero), and may
            share a bucket with others that have one.
        places: Bits that say where zeros are, for each coordinate; 0 if zeros are quantised.
    """

    found: float
    sampled: float
    lost: float
    share: float
    places: float

    @classmethod
    def of(cls, collected: Sequence[np.ndarray]) -> Coverage:
        """Return the coverage of the ranks' vectors, which begin with ``Usable.head``."""
        heads = np.sum([own[:HEAD] for own in collected], axis=0)
        found, sampled, lost, nonzero, coordinates, bits = heads.tolist()
        coordinates = coordinates or 1.0
        return cls(found, sampled, lost, nonzero / coordinates, bits / coordinates)

    @property
    def share_of_finite(self) -> float:
        """Return ``share`` among the buckets that are finite; buckets are taken as equally long."""
        finite = self.sampled - self.lost
        return min(1.0, self.share * self.sampled / finite) if finite else 0.0

    @property
    def complete(self) -> bool:
        """Return whether a fit need not be repeated soon."""
        return 0 < self.found == self.sampled - self.lost and self.share >= 1 - ZEROS
