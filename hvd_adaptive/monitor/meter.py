"""Collect the figures of a step on this rank, and average them over the steps of a record."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvd_adaptive.base.tensors import HostCopy

SECONDS = ("encode_s", "exchange_s", "decode_s")
# Figures that records contain in another form.
OTHERS = ("squared_error", "squared_norm", "peak_bytes", "buckets", "non_finite")
# Figures that groups do not have. They are compared with step_s, so they are of the same steps.
OF_WHOLE = ("blocked_s", "arrival_s")


@dataclass
class StepFigures:
    """Figures of one step, or of one of its groups, on this rank.

    Attributes:
        coordinates: Gradient coordinates encoded.
        uncompressed_bytes: Their bytes before encoding.
        payload_bytes: Bytes encoded.
        wire_bytes: Bytes sent by this rank, computed from the exchange; in a step, with those of
            attempts that were given up.
        squared_error: Squared error of all coordinates that this rank quantises, or sends rounded,
            estimated from the measured buckets.
        squared_norm: Squared norm of the same coordinates, estimated likewise.
        encode_s: Seconds of encoding.
        exchange_s: Seconds of waiting for the exchange.
        decode_s: Seconds of decoding.
        flight_s: Seconds from submitting collectives to Horovod until their results are read,
            summed over groups, which overlap. Measured only with a monitor.
        blocked_s: Seconds that the training's thread spent in this package; those of a worker's
            thread are not among them. Measured only with a monitor.
        arrival_s: Seconds from the first gradient's arrival until the exchange was waited for.
        peak_bytes: Most memory held at a time; see ``StepMeter.hold``.
        buckets: Averaged buckets that were checked.
        non_finite: Those of them that are not finite. See ``StepMeter.count_non_finite``.
    """

    coordinates: int = 0
    uncompressed_bytes: int = 0
    payload_bytes: int = 0
    wire_bytes: int = 0
    squared_error: float = 0.0
    squared_norm: float = 0.0
    encode_s: float = 0.0
    exchange_s: float = 0.0
    decode_s: float = 0.0
    flight_s: float = 0.0
    blocked_s: float = 0.0
    arrival_s: float = 0.0
    peak_bytes: int = 0
    buckets: int = 0
    non_finite: int = 0

    def add(self, one: StepFigures) -> None:
        """Add the figures of another step; ``peak_bytes`` is maximised instead."""
        own, peak = vars(self), max(self.peak_bytes, one.peak_bytes)
        own |= {name: own[name] + value for name, value in vars(one).items()}
        self.peak_bytes = peak


class StepMeter:
    """Collector of a step's figures; those of the last completed step can be read meanwhile.

    Attributes:
        detailed: Whether to keep each group's figures.
        current: Figures of the current step.
        last: Figures of the last completed step, or None.
        squares: For each group that was measured the rows [squared error, squared norm] of its
            sampled buckets, the number of buckets that each represents, and the group. Rows that
            are not finite do not count.
    """

    def __init__(self) -> None:
        self.detailed = False
        self.current = StepFigures()
        self.last: StepFigures | None = None
        self.last_groups: dict[int, StepFigures] = {}
        self._groups: dict[int, StepFigures] = {}
        # For each bucket of a group's average whether it is finite, of the last step and this one.
        self._last_finite: dict[int, torch.Tensor] = {}
        self._finite: dict[int, torch.Tensor] = {}
        self.squares: list[tuple[HostCopy, Sequence[float], int]] = []
        self._held: dict[Hashable, int] = {}
        self._total = 0  # the sum of these, a few for each group in flight

    def hold(self, sizes: Mapping[Hashable, int]) -> None:
        """Record how many bytes beyond the gradients are held now, by what holds them: a group's
        payloads, buffers, residuals, or results that are kept.
        """
        for what, size in sizes.items():
            self._total += size - self._held.pop(what, 0)
            if size:
                self._held[what] = size
        self.current.peak_bytes = max(self.current.peak_bytes, self._total)

    def add(self, group: int | None = None, /, **amounts: float) -> None:
        """Add amounts to fields of the step, and of one of its groups."""
        targets = [vars(self.current)]
        if self.detailed and group is not None:
            targets.append(vars(self._groups.setdefault(group, StepFigures())))
        for figures in targets:
            for field, amount in amounts.items():
                figures[field] += amount

    def look(
        self, decoded: torch.Tensor, bucket_size: int, group: int, without_zeros: bool = False
    ) -> None:
        """Note, on its device, which buckets of a group's quantised coordinates are finite after
        averaging. A NaN or Inf of any rank makes the whole bucket NaN: the first coordinate is
        checked. All are checked if buckets are cut ``without_zeros`` (coding/zeros.py). A sum over
        ranks that overflows in another coordinate is not noticed, which would cost a pass.
        """
        if not decoded.numel():
            return
        if without_zeros:
            size = min(bucket_size, decoded.numel())
            missing = -decoded.numel() % size
            finite = torch.nn.functional.pad(decoded.isfinite(), (0, missing), value=True)
            self._finite[group] = finite.view(-1, size).all(dim=1)
        else:
            self._finite[group] = decoded[::bucket_size].isfinite()

    def count_non_finite(self) -> None:
        """Count the averaged buckets of the last step that are not finite; wait for a GPU."""
        masks, self._last_finite = self._last_finite, {}
        for group, finite in masks.items():
            count = int(HostCopy((~finite).sum()))
            for figures in (self.last, self.last_groups.get(group)):
                if figures is not None:
                    figures.buckets += finite.numel()
                    figures.non_finite += count

    def errors(self) -> dict[int, tuple[float, float]]:
        """Return the squared error and squared norm of each measured group of this step; wait for
        a GPU.
        """
        sums: dict[int, tuple[float, float]] = {}
        for squares, weights, group in self.squares:
            error, norm, any_finite = 0.0, 0.0, False
            for (e, n), weight in zip(squares.get().tolist(), weights, strict=True):
                if math.isfinite(e) and math.isfinite(n):
                    error, norm, any_finite = error + e * weight, norm + n * weight, True
            if any_finite:
                earlier = sums.get(group, (0.0, 0.0))
                sums[group] = earlier[0] + error, earlier[1] + norm
        return sums

    def clear(self) -> None:
        """Record that no memory is held any more."""
        self._held.clear()
        self._total = 0

    def finish(self) -> None:
        """Complete the step."""
        for group, (error, norm) in self.errors().items():
            self.add(group, squared_error=error, squared_norm=norm)
        self.last, self.last_groups = self.current, self._groups
        self._last_finite = self._finite
        self._restart()

    def give_up(self) -> None:
        """Give up the attempt at a step. What it has sent counts among what the step sends."""
        sent = self.current.wire_bytes
        self._restart()
        self.current.wire_bytes = sent

    def _restart(self) -> None:
        """Begin a new step; buffers and residuals remain held."""
        for what in [*self._held]:
            if not isinstance(what, str):
                self._total -= self._held.pop(what)
        self.current = StepFigures(peak_bytes=self._total)
        self._groups, self._finite, self.squares = {}, {}, []

    def report(self) -> dict[str, float]:
        """Return the figures of the last step, zeros before the first one, that
        ``GradientCompressor.report`` describes.

        relative_error is that of all coordinates v that this rank quantises, or that
        exchange="auto" sends rounded, estimated from a few full buckets and all partial ones. With
        exchange="hierarchical" v is the rank's slice of its node's mean. For schemes with a level
        table it is the expectation over their rounding. It is NaN if no bucket could be measured.
        peak_bytes excludes the temporary memory of encoding one group and Horovod's own buffers.
        """
        self.count_non_finite()
        last = self.last or StepFigures()
        norm = last.squared_norm
        sizes = ("coordinates", "payload_bytes", "wire_bytes", "uncompressed_bytes", "peak_bytes")
        bits = 8 * last.payload_bytes / last.coordinates if last.coordinates else 0.0
        return {
            **{name: getattr(last, name) for name in (*sizes, *SECONDS)},
            "bits_per_coordinate": bits,
            "relative_error": last.squared_error / norm if norm else math.nan,
            "non_finite": last.non_finite,
        }


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

    def add(self, number: int, meter: StepMeter, version: int) -> None:
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

    def record(self) -> dict[str, Any]:
        """Return the record that docs/monitoring.md describes: means per step of ``StepFigures``,
        and the figures of each group.
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
            "non_finite": self._total.non_finite,
            "table_version": self._version,
            "monitor_s": self.monitor_s / self.steps,
            "groups": [self._group(*of_group) for of_group in sorted(self._groups.items())],
        }

    def _group(self, group: int, figures: StepFigures) -> dict[str, Any]:
        means = _means(figures, self.steps)
        own = {name: mean for name, mean in means.items() if name not in OF_WHOLE}
        return {"group": group} | own | {"non_finite": figures.non_finite}


def _means(figures: StepFigures, steps: int) -> dict[str, Any]:
    means = {name: sum_ / steps for name, sum_ in vars(figures).items() if name not in OTHERS}
    coordinates, payload = figures.coordinates, figures.payload_bytes
    norm = figures.squared_norm
    return means | {
        "ratio": figures.uncompressed_bytes / payload if payload else None,
        "bits_per_coordinate": 8 * payload / coordinates if coordinates else None,
        "relative_error": figures.squared_error / norm if norm else None,
    }
