"""Implement AMQ, adaptive multiplier quantization (Faghri et al. 2020)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from hvd_adaptive.checks import check_choice, check_integer
from hvd_adaptive.levels import Distribution, exponential_magnitudes, fit_multiplier
from hvd_adaptive.schemes.adaptive import Adaptation, AdaptiveScheme
from hvd_adaptive.schemes.level_table import LevelTable
from hvd_adaptive.settings import Settings


class AMQ(AdaptiveScheme):
    """Adaptive multiplier quantization (Faghri et al., Adaptive Gradient Quantization for
    Data-Parallel SGD, 2020, section 3.3, Eqs 8, 32, 38, App. B.3.3, C.3).

    The table is +-1, +-p, +-p**2, ... with a single parameter, the multiplier p. It is fitted by
    descent on the expected variance of the sampled buckets or, if ``normalized`` (AMQ-N), on the
    expected normalized variance. Statistics, schedule and broadcast are those of ALQ.

    Args:
        bits: 2 to 8, including the sign.
        norm: "l2" or "linf".
        normalized: Whether to minimise the expected normalized variance (AMQ-N).
        update_steps: As in ALQ.
        samples: As in ALQ.
        statistics: As in ALQ.
        **shared: See ``settings.Settings``.

    Raises:
        ValueError: A keyword is wrong.
    """

    name = "amq"

    def __init__(
        self,
        *,
        bits: int = 3,
        norm: str = "l2",
        normalized: bool = False,
        update_steps: Iterable[int] | Callable[[int], bool] | None = None,
        samples: int = 20,
        statistics: str = "histogram",
        **shared: Any,
    ) -> None:
        bits = check_integer("bits", bits, 2, 8)
        check_choice("norm", norm, ("l2", "linf"))
        count = 1 << (bits - 1)
        first = LevelTable(bits, True, exponential_magnitudes(count, 0.5, symmetric=True))
        adaptation = Adaptation(normalized, update_steps, samples, statistics)
        super().__init__(Settings.from_keywords("AMQ", shared), norm, first, adaptation)

    @property
    def multiplier(self) -> float:
        """Return p, the ratio of neighbouring levels."""
        return float(self._table.magnitudes[-2])

    def fit_magnitudes(self, distribution: Distribution) -> np.ndarray:
        count = len(self._table.magnitudes)
        return fit_multiplier(distribution, count, start=self.multiplier).magnitudes
