"""How far sums of independent bounded errors may be from their means: Bernstein's inequality.

It needs no normal limit, which rare jumps of a coarse quantiser are far from.
"""

from __future__ import annotations

import math

# Two-sided chance of a normal deviate beyond five sigma.
FIVE_SIGMA = math.erfc(5 / math.sqrt(2))


def deviation(variance: float, largest: float, chance: float) -> float:
    """t with P(|S - E S| >= t) <= chance, for a sum S of independent terms.

    variance: of S.  largest: no term is farther from its mean.
    P <= 2 exp(-t²/2 / (variance + largest t/3)), solved for t.
    """
    log = math.log(2 / chance)
    return log * largest / 3 + math.sqrt((log * largest / 3) ** 2 + 2 * log * variance)
