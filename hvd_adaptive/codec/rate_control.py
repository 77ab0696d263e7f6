"""Control the rate: choose the bits of the next step size so that the average meets a budget."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

# Largest correction until the next update, as a share of the budget.
LARGEST_CORRECTION = 0.1
LEAST_RATIO, MOST_RATIO = 0.25, 4.0


@dataclass(frozen=True)
class RateControl:
    """Bits that all ranks have sent so far, and the error of the rate's model.

    Each update makes two corrections. First, the model covers neither headers nor zero buckets, and
    is fitted to old samples. ``ratio`` is the ratio of measured to modelled bits of the steps since
    the last update, averaged with the previous ratio; the model is evaluated halfway between the
    laws at both ends. Second, the accumulated excess or deficit is compensated over as many
    coordinates as have been sent, so the average approaches the budget as 1/coordinates**2.

    Attributes:
        budget: Bits per coordinate.
        ratio: Ratio of measured to modelled bits.
        bits: Bits sent since the beginning, over all ranks.
        coordinates: Coordinates sent since the beginning, over all ranks.
    """

    budget: float
    ratio: float = 1.0
    bits: float = 0.0
    coordinates: float = 0.0

    @property
    def average(self) -> float:
        """Return the bits per coordinate so far, or the budget if nothing has been sent."""
        return self.bits / self.coordinates if self.coordinates else self.budget

    @property
    def aim(self) -> float:
        """Return the modelled bits per coordinate that the next code should spend."""
        most = LARGEST_CORRECTION * self.budget
        excess = min(max(self.average - self.budget, -most), most)
        return (self.budget - excess) / self.ratio

    def updated(self, bits: float, coordinates: float, modelled: float) -> RateControl:
        """Return the control after ``bits`` for ``coordinates`` more were sent.

        ``modelled`` is the number of bits per coordinate that the model predicted.
        """
        if not (coordinates > 0 and bits >= 0 and math.isfinite(bits + coordinates)):
            return self  # nothing was sent, or a rank reports invalid numbers
        measured = bits / coordinates / modelled
        first = self.coordinates == 0
        ratio = measured if first else (self.ratio + measured) / 2
        return replace(
            self,
            ratio=float(np.clip(ratio, LEAST_RATIO, MOST_RATIO)),
            bits=self.bits + bits,
            coordinates=self.coordinates + coordinates,
        )
