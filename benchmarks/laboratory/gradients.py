"""Draw gradients that resemble a network's, the same for every method.

``gradient`` is a function of tensor, rank and variant, so that the exact mean over ranks can be
computed anywhere. Rank r's gradient of variant v is

    scale · (sqrt(COMMON)·C + sqrt(1 - COMMON)·O(r, v)),

where C is the same for all ranks and variants (what all minibatches agree on), O is each one's own
(what sampling adds), and the root mean square "scale" differs from tensor to tensor. Both are a sum
of outer products of heavy-tailed vectors with falling weights, which holds LOW_RANK of the energy,
and heavy-tailed noise. Constants were set after LeNet's gradients on MNIST at batch 32 (steps 50
and 200: common part 0.1 to 0.4 of the energy, kurtosis 3 to 25, first singular vector 0.2 to 0.6,
first four 0.5 to 0.9, root mean squares from 2e-3 to 5e-2); there is no training in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

COMMON = 0.3
LOW_RANK = 0.7
TERMS = 16
DECAY = 1.2  # energy of the i-th outer product falls as i**-DECAY
TAIL = 0.5  # standard deviation of the logarithm of a number's scale
SCALES = (2e-3, 5e-2)
VARIANTS = 3  # successive steps see different minibatches


def gradient(slot: int, shape: Sequence[int], rank: int, variant: int) -> torch.Tensor:
    """Return one rank's gradient of the tensor in ``slot`` (float32)."""
    common = _part(shape, _generator(slot, 0, 0))
    own = _part(shape, _generator(slot, rank + 1, variant))
    mixed = common.mul_(math.sqrt(COMMON)).add_(own, alpha=math.sqrt(1 - COMMON))
    return mixed.mul_(_scale(slot))


class Drawn:
    """Draw the gradients of a model's shapes."""

    def __init__(self, shapes: Sequence[Sequence[int]]) -> None:
        self.shapes = shapes

    def gradients(self, rank: int, variant: int) -> list[torch.Tensor]:
        """Return one rank's gradients of all slots."""
        return [gradient(slot, shape, rank, variant) for slot, shape in enumerate(self.shapes)]


def exact_mean(source: Any, ranks: int, variant: int) -> list[torch.Tensor]:
    """Return the mean of all ranks' gradients of each slot, summed in float64.

    ``source`` is Drawn, or Trained (trained.py).
    """
    total = [gradient.double() for gradient in source.gradients(0, variant)]
    for rank in range(1, ranks):
        for slot, own in zip(total, source.gradients(rank, variant), strict=True):
            slot += own
    return [slot / ranks for slot in total]


def _part(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Mean square about 1."""
    noise = _heavy(tuple(shape), generator)
    if len(shape) == 1:
        return noise
    rows, columns = shape[0], math.prod(shape[1:])
    terms = min(TERMS, rows, columns)
    energies = torch.arange(1, terms + 1, dtype=torch.float32) ** -DECAY
    weights = (LOW_RANK * energies / energies.sum()).sqrt()
    left, right = _heavy((rows, terms), generator), _heavy((terms, columns), generator)
    noise = noise.view(rows, columns).mul_(math.sqrt(1 - LOW_RANK))
    return torch.addmm(noise, left * weights, right).view(tuple(shape))


def _heavy(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Draw normal numbers of log-normal scales: mean square 1, kurtosis 3·exp(4·TAIL²)."""
    scales = torch.randn(shape, generator=generator).mul_(TAIL).sub_(TAIL**2).exp_()
    return torch.randn(shape, generator=generator).mul_(scales)


def _scale(slot: int) -> float:
    place = float(torch.rand((), generator=_generator(slot, 0, 1)))
    return SCALES[0] * (SCALES[1] / SCALES[0]) ** place


def _generator(slot: int, source: int, variant: int) -> torch.Generator:
    return torch.Generator().manual_seed((slot * 4096 + source) * 16 + variant)
