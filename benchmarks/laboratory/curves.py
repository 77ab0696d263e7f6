"""Seconds to a quality, from the curves of paired runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy import stats

SMOOTHED = 3  # tests whose mean is the quality at the last of them
CONFIDENCE = 0.95
SAME = 0.02  # by which qualities may differ that were reached in other orders of sums

# (step, seconds, quality) of each test.
Curve = Sequence[Sequence[float]]


def smoothed(curve: Curve) -> list[tuple[float, float]]:
    """Return (seconds, mean quality of the last tests)."""
    qualities = [row[2] for row in curve]
    return [
        (row[1], statistics.fmean(qualities[max(0, i + 1 - SMOOTHED) : i + 1]))
        for i, row in enumerate(curve)
    ]


def seconds_to(curve: Curve, target: float, larger_is_better: bool) -> float | None:
    """Return when the smoothed quality first reaches ``target``, linear between tests, or None."""
    sign = 1 if larger_is_better else -1
    before = None
    for seconds, quality in smoothed(curve):
        if sign * quality >= sign * target:
            if before is None or quality == before[1]:
                return seconds
            share = (target - before[1]) / (quality - before[1])
            return before[0] + share * (seconds - before[0])
        before = seconds, quality
    return None


def at_speed(curves: Mapping[int, Curve], timed: Mapping[int, Curve]) -> dict[int, Curve]:
    """Return the curves with the seconds of other runs: the median of their seconds a step.

    Args:
        curves: {seed: curve}; their seconds do not count.
        timed: {seed: curve} of the same method elsewhere.

    Raises:
        ValueError: A run of the same seed has learned something else in the same steps.
    """
    for seed, curve in timed.items():
        known = {row[0]: row[2] for row in curves.get(seed, ())}
        for step, _, quality in curve:
            if not math.isclose(known.get(step, quality), quality, rel_tol=SAME):
                raise ValueError(
                    f"seed {seed}, step {step}: quality {quality:g} here, {known[step]:g} there"
                )
    each = statistics.median(curve[-1][1] / curve[-1][0] for curve in timed.values())
    return {
        seed: [(step, step * each, quality) for step, _, quality in curve]
        for seed, curve in curves.items()
    }


@dataclass(frozen=True)
class Reached:
    """How fast a method reaches the baseline's quality, over seeds.

    Attributes:
        seconds: Median over the seeds that reach it; None if none does.
        ratio: Geometric mean over seeds of the baseline's seconds by the method's, with its
            interval of 95 %; None unless every seed of at least two reaches it.
        reached: Seeds that reach it.
        seeds: All seeds.
        final: Mean quality at the end.
        step: Median seconds of a step.
        apart: Mean over seeds of its quality minus the baseline's, after the baseline's steps, and
            half of its interval of 95 %; None for less than two seeds.
    """

    seconds: float | None
    ratio: tuple[float, float, float] | None
    reached: int
    seeds: int
    final: float
    step: float
    apart: tuple[float, float] | None


def summary(
    curves: Mapping[str, Mapping[int, Curve]],
    baseline: str,
    steps: int,
    larger_is_better: bool,
    paired: bool = True,
) -> dict[str, Reached]:
    """Return how fast each method reaches the baseline's quality after ``steps`` steps.

    Args:
        curves: {method: {seed: curve}}.
        baseline: A method of ``curves``.
        steps: Steps of the baseline until the target; it may train more.
        larger_is_better: Whether a larger quality is better.
        paired: Whether a seed's target is the baseline's smoothed quality of that seed. If not, it
            is the mean over seeds, the same for all.
    """
    ends = _after(curves[baseline], steps)
    targets = ends if paired else dict.fromkeys(ends, statistics.fmean(ends.values()))
    times = {label: _times(own, targets, larger_is_better) for label, own in curves.items()}
    return {
        label: _reached(own, times[label], times[baseline], _apart(_after(own, steps), ends))
        for label, own in curves.items()
    }


def _after(curves: Mapping[int, Curve], steps: int) -> dict[int, float]:
    """Return each seed's smoothed quality after ``steps`` steps."""
    known = {seed: [row for row in curve if row[0] <= steps] for seed, curve in curves.items()}
    return {seed: smoothed(curve)[-1][1] for seed, curve in known.items()}


def _times(
    curves: Mapping[int, Curve], targets: Mapping[int, float], larger_is_better: bool
) -> dict[int, float]:
    """Return the seconds of the seeds that reach their targets."""
    there = {
        seed: seconds_to(curve, targets[seed], larger_is_better)
        for seed, curve in curves.items()
        if seed in targets
    }
    return {seed: seconds for seed, seconds in there.items() if seconds}


def _reached(
    own: Mapping[int, Curve],
    there: Mapping[int, float],
    base: Mapping[int, float],
    apart: tuple[float, float] | None,
) -> Reached:
    logs = [math.log(base[seed] / seconds) for seed, seconds in there.items() if seed in base]
    return Reached(
        statistics.median(there.values()) if there else None,
        interval(logs) if len(logs) == len(own) > 1 else None,
        len(there),
        len(own),
        statistics.fmean(smoothed(curve)[-1][1] for curve in own.values()),
        statistics.median(curve[-1][1] / curve[-1][0] for curve in own.values()),
        apart,
    )


def _apart(own: Mapping[int, float], base: Mapping[int, float]) -> tuple[float, float] | None:
    gaps = [quality - base[seed] for seed, quality in own.items() if seed in base]
    return None if len(gaps) < 2 else (statistics.fmean(gaps), half(gaps))


def half(values: Sequence[float]) -> float:
    """Return half of the t interval of the mean."""
    error = statistics.stdev(values) / len(values) ** 0.5
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * error


def interval(logs: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean and the ends of its t interval, from logarithms."""
    mean, width = statistics.fmean(logs), half(logs)
    return math.exp(mean), math.exp(mean - width), math.exp(mean + width)


def draw(curves: Mapping[str, Mapping[int, Curve]], quality: str, title: str, path: str) -> None:
    """Draw each method's mean quality against its mean seconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for number, (label, own) in enumerate(curves.items()):
        rows = [smoothed(curve) for curve in own.values()]
        seconds = [statistics.fmean(row[0] for row in at) for at in zip(*rows, strict=True)]
        qualities = [statistics.fmean(row[1] for row in at) for at in zip(*rows, strict=True)]
        style = "--" if label.startswith("ddp/") else ":" if "float" in label else "-"
        axes.plot(seconds, qualities, style, color=f"C{number % 10}", label=label, lw=1.3)
    axes.set_xlabel("seconds of training")
    axes.set_ylabel(quality)
    axes.set_title(title, fontsize="medium")
    axes.set_xscale("log")
    axes.legend(fontsize="x-small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
