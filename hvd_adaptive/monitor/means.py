"""Average figures over the steps of a record."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from hvd_adaptive.monitor.meter import StepFigures, StepMeter

# Figures that records contain in another form.
OTHERS = ("squared_error", "squared_norm", "peak_bytes")
# Figures that groups do not have. They are compared with step_s, so they are of the same steps.
OF_WHOLE = ("blocked_s", "arrival_s")


class Means:
    """Means of the figures of the steps since ``begin`` (time.perf_counter).

    If ``begin`` is None, times count from the end of the first step.
    """

    def __init__(self, begin: float | None) -> None:
        self._begin = begin
        self._timed = 0  # steps since then
        self._of_timed = StepFigures()
        self.ended = begin or 0.0
        self.steps = 0
        self.monitor_s = 0.0
        self._step, self._version = 0, 0
        self._total = StepFigures()
        self._groups: dict[int, StepFigures] = {}
        self._non_finite: dict[int, int] = {}

    def add(
        self, number: int, meter: StepMeter, non_finite: Mapping[int, int], version: int
    ) -> None:
        """Add the figures of a completed step."""
        last = meter.last or StepFigures()
        self.ended = time.perf_counter()
        if self._begin is None:
            self._begin = self.ended
        else:
            self._timed += 1
            self._of_timed.add(last)
        self.steps += 1
        self._step, self._version = number, version
        self._total.add(last)
        for group, figures in meter.last_groups.items():
            self._groups.setdefault(group, StepFigures()).add(figures)
        for group, count in non_finite.items():
            self._non_finite[group] = self._non_finite.get(group, 0) + count

    def record(self) -> dict[str, Any]:
        """Return the record: means per step of the figures in ``StepMeter.report``, and more.

        The further keys are step (number of the last step), steps (number of steps), ratio (bytes
        of gradients over bytes of payloads), flight_s (see ``StepFigures``), step_s (time from one
        step's end to the next one's), non_finite (buckets, summed over all steps), monitor_s (time
        that the monitor took) and groups (the figures of each group).
        """
        whole = _means(self._total, self.steps)
        begin, timed = self.ended if self._begin is None else self._begin, self._timed
        of_timed = {name: getattr(self._of_timed, name) for name in OF_WHOLE}
        return {
            "step": self._step,
            "steps": self.steps,
            **whole,
            "peak_bytes": self._total.peak_bytes,
            "step_s": (self.ended - begin) / timed if timed else None,
            **{name: total / timed if timed else None for name, total in of_timed.items()},
            "non_finite": sum(self._non_finite.values()),
            "table_version": self._version,
            "monitor_s": self.monitor_s / self.steps,
            "groups": [self._group(*of_group) for of_group in sorted(self._groups.items())],
        }

    def _group(self, group: int, figures: StepFigures) -> dict[str, Any]:
        means = _means(figures, self.steps)
        own = {name: mean for name, mean in means.items() if name not in OF_WHOLE}
        return {"group": group} | own | {"non_finite": self._non_finite.get(group, 0)}


def _means(figures: StepFigures, steps: int) -> dict[str, Any]:
    means = {name: sum_ / steps for name, sum_ in vars(figures).items() if name not in OTHERS}
    coordinates, payload = figures.coordinates, figures.payload_bytes
    norm = figures.squared_norm
    return means | {
        "ratio": figures.uncompressed_bytes / payload if payload else None,
        "bits_per_coordinate": 8 * payload / coordinates if coordinates else None,
        "relative_error": figures.squared_error / norm if norm else None,
    }
