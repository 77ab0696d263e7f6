"""Rate control: what the next step size should spend, so that the average meets a budget."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

# The average is brought back to the budget by so much of it at most, until the next update.
LARGEST_CORRECTION = 0.1
LEAST_RATIO, MOST_RATIO = 0.25, 4.0


@dataclass(frozen=True)
class RateControl:
    """What all ranks have sent so far, and how far the model of the rate is off.

    Two corrections, at each update. The model knows neither headers nor zero buckets, and fits old
    samples: ``ratio`` is measured over modelled bits of the steps since the last update, the model
    taken half way between the laws at its two ends, and averaged with the ratio before. What was
    spent too much or too little all in all is made good over as many coordinates as there were, so
    that the average approaches the budget as 1/coordinates**2.

    budget: bits per coordinate. bits, coordinates: sent since the beginning, over all ranks.
    """

    budget: float
    ratio: float = 1.0
    bits: float = 0.0
    coordinates: float = 0.0

    @property
    def average(self) -> float:
        """Bits per coordinate so far; the budget where nothing has been sent."""
        return self.bits / self.coordinates if self.coordinates else self.budget

    @property
    def aim(self) -> float:
        """Modelled bits per coordinate that the next code should spend."""
        most = LARGEST_CORRECTION * self.budget
        excess = min(max(self.average - self.budget, -most), most)
        return (self.budget - excess) / self.ratio

    def told(self, bits: float, coordinates: float, modelled: float) -> RateControl:
        """After ``bits`` for ``coordinates`` more, where the model expected ``modelled`` each."""
        if not (coordinates > 0 and bits >= 0 and math.isfinite(bits + coordinates)):
            return self  # nothing was sent, or a rank tells nonsense
        measured = bits / coordinates / modelled
        first = self.coordinates == 0
        ratio = measured if first else (self.ratio + measured) / 2
        return replace(
            self,
            ratio=float(np.clip(ratio, LEAST_RATIO, MOST_RATIO)),
            bits=self.bits + bits,
            coordinates=self.coordinates + coordinates,
        )
