"""Define Adaptation, the keywords of a scheme that is fitted to gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from hvd_adaptive.adapt.statistics import STATISTICS
from hvd_adaptive.base.checks import check_choice, check_flag, check_integer


@dataclasses.dataclass(frozen=True)
class Adaptation:
    """Parameters of a scheme's statistics and refits.

    Attributes:
        normalized: Weigh all buckets equally instead of by their squared norms.
        update_steps: See ``adapt.schedule.UpdateSchedule``.
        samples: Number of buckets to sample.
        statistics: Kind of statistics, a key of ``adapt.statistics.STATISTICS``.
    """

    normalized: bool = False
    update_steps: Iterable[int] | Callable[[int], bool] | None = None
    samples: int = 20
    statistics: str = "histogram"

    def __post_init__(self) -> None:
        check_flag("normalized", self.normalized)
        object.__setattr__(self, "samples", check_integer("samples", self.samples, 1))
        check_choice("statistics", self.statistics, STATISTICS)
