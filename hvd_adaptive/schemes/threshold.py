"""Define Threshold, which steers water-filling to a rate over steps, on one rank."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hvd_adaptive import states
from hvd_adaptive.levels.waterfill import allocate, multiplier_of, spend

# Weight of the last step in what is known of steps.
WEIGHT = 0.5
# The correction of λ grows by this share of a step's excess of bits, up to a factor.
GAIN, MOST_CORRECTION = 0.25, 4.0
# A payload shows that a step's energy differs by no more than this (a logarithm), and as long as
# few of the step's coordinates are known, the usual energy counts as much as this share of them.
MOST_SHOWN, PRIOR = math.log(4), 0.05


class Threshold:
    """Predict the multiplier λ of a step's payloads: bits go to the buckets that have the most
    energy among all of the step's, not of their payload alone.

    Payloads leave before the step's last gradients are known. The multiplier that fits a step is
    proportional to its energy, which varies from minibatch to minibatch, but in all layers
    together. So λ is predicted from the step's payloads so far: their energies are compared with
    those of the same payloads in the last steps. A correction sums up by how many bits steps missed
    ``bits``, so that their average comes to it. In the first step each payload divides its own
    bits.

    1. ``allot_next`` returns the widths of the next payload's buckets, and counts it.
    2. ``end_step`` learns from the step; ``forget_step`` drops what was counted.

    λ is this rank's own: receivers read widths, and need no λ. Steps have the same payloads, in the
    same order.

    Args:
        bits: Mean bits per coordinate.
        losses: Relative errors at 1, 2, ... bits, descending.
    """

    def __init__(self, bits: float, losses: np.ndarray) -> None:
        self.bits, self._losses = bits, losses
        # Mean logarithms over steps: of payloads' energies per coordinate, and of λ.
        self._levels, self._mean = np.empty(0), 0.0
        self._coordinates = 0.0  # of a step
        self._correction = 1.0
        # Of this step: payloads, their coordinates, and these times what each payload shows.
        self._step: list[_Payload] = []
        self._known = self._shown = 0.0

    @property
    def multiplier(self) -> float | None:
        """Return λ, as far as this step is known; None before the first step has ended."""
        if not self._levels.size:
            return None
        known = self._known + PRIOR * self._coordinates
        return math.exp(self._mean + self._shown / known) * self._correction

    def allot(self, energies: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return widths (int64) and chances (float64) of buckets, without counting them.

        Args:
            energies: Squared norms, finite, float64 (buckets,).
            lengths: Numbers of coordinates (buckets,).
        """
        multiplier = self.multiplier
        if multiplier is None:
            return allocate(energies, lengths, self._losses, self.bits)
        return spend(energies, lengths, self._losses, multiplier)

    def allot_next(
        self, energies: np.ndarray, lengths: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the same of the step's next payload, and count it."""
        payload, place = _Payload.of(energies, lengths), len(self._step)
        self._step.append(payload)
        if place < self._levels.size:
            self._known += payload.coordinates
            self._shown += payload.coordinates * _difference(payload.level, self._levels[place])
        widths, chances = self.allot(energies, lengths)
        payload.bits = float((widths * chances) @ lengths)
        return widths, chances

    def forget_step(self) -> None:
        """Drop what was counted in a step that is given up."""
        self._step, self._known, self._shown = [], 0.0, 0.0

    def end_step(self) -> None:
        """Learn from the step, if any bucket was finite and not zero."""
        step = self._step
        self.forget_step()
        levels = np.array([payload.level for payload in step])
        if not np.isfinite(levels).any():
            return
        energies = np.concatenate([payload.energies for payload in step])
        lengths = np.concatenate([payload.lengths for payload in step])
        own = math.log(multiplier_of(energies, lengths, self._losses, self.bits))
        coordinates = float(lengths.sum())
        if self._levels.size != levels.size:  # the first step, or another layout
            self._levels, self._mean, self._coordinates = levels, own, coordinates
            return
        excess = sum(payload.bits for payload in step) / (self.bits * coordinates) - 1
        factor = self._correction * math.exp(GAIN * min(excess, 1.0))
        self._correction = min(max(factor, 1 / MOST_CORRECTION), MOST_CORRECTION)
        self._mean += WEIGHT * (own - self._mean)
        known = np.where(np.isfinite(self._levels), self._levels, levels)
        self._levels = known + WEIGHT * (np.where(np.isfinite(levels), levels, known) - known)

    def adopt(self, old: Threshold) -> None:
        """Continue ``old`` if it steers to the same rate."""
        if old.bits == self.bits:
            self.take_state(old.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Return what is known of steps; {} before the first one has ended."""
        if not self._levels.size:
            return {}
        levels = torch.from_numpy(self._levels.copy())
        numbers = [self._mean, self._correction, self._coordinates]
        return {
            "levels": levels,
            "numbers": torch.tensor(numbers, dtype=torch.float64, device="cpu"),
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError unless ``take_state`` can load ``state``."""
        if not states.mapping(state, "state: threshold"):
            return
        levels, of = states.numbers(state, "levels"), "state: threshold"
        if not np.isfinite(levels).any() or np.isnan(levels).any() or levels.max() == np.inf:
            raise ValueError(f"{of}: levels must be logarithms, not {levels.tolist()}")
        numbers = states.numbers(state, "numbers").tolist()
        if len(numbers) != 3 or not all(math.isfinite(n) for n in numbers) or numbers[2] <= 0:
            raise ValueError(f"{of}: numbers must be λ, correction, coordinates, not {numbers}")
        if not 1 / MOST_CORRECTION <= numbers[1] <= MOST_CORRECTION:
            raise ValueError(f"{of}: the correction is {numbers[1]}")

    def take_state(self, state: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned, after ``check_state``."""
        self._levels, self._mean, self._correction, self._coordinates = np.empty(0), 0.0, 1.0, 0.0
        if state:
            self._levels = np.array(states.numbers(state, "levels"))
            self._mean, self._correction, self._coordinates = states.numbers(state, "numbers")


@dataclass
class _Payload:
    """Describe a payload of this step.

    Attributes:
        energies: Energies of its buckets.
        lengths: Their coordinates.
        coordinates: All of them.
        level: Logarithm of the energy per coordinate, -inf without any.
        bits: Expected bits of its codes.
    """

    energies: np.ndarray
    lengths: np.ndarray
    coordinates: float
    level: float
    bits: float = 0.0

    @classmethod
    def of(cls, energies: np.ndarray, lengths: np.ndarray) -> _Payload:
        energy, coordinates = float(energies.sum()), float(lengths.sum())
        level = math.log(energy / coordinates) if energy > 0 else -math.inf
        return cls(energies, lengths, coordinates, level)


def _difference(level: float, usual: float) -> float:
    """Return level - usual within ``MOST_SHOWN``, 0 if one is unknown."""
    found = level - usual
    return min(max(found, -MOST_SHOWN), MOST_SHOWN) if math.isfinite(found) else 0.0
