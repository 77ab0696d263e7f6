"""Accuracies of compare.py's runs, seed by seed, and variances on SGD's trajectory."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from compare_runs import Outcome
from compare_studies import budget_runs, main_runs, trajectories
from scipy import stats


@dataclass(frozen=True)
class Interval:
    """A mean and the half-width of its 95% interval (Student's t); NaN for a single value."""

    mean: float
    half: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """From independent values."""
        values = np.asarray(values, dtype=float)
        if len(values) < 2:
            return cls(float(values.mean()), float("nan"))
        error = values.std(ddof=1) / np.sqrt(len(values))
        return cls(float(values.mean()), float(stats.t.ppf(0.975, len(values) - 1) * error))

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half


class Scores:
    """Accuracies of one task at one setting, by method and in the order of the seeds."""

    def __init__(self, outcomes: Iterable[Outcome]) -> None:
        self.outcomes: dict[str, list[Outcome]] = {}
        for outcome in sorted(outcomes, key=lambda outcome: outcome.run.seed):
            self.outcomes.setdefault(outcome.run.method, []).append(outcome)

    def __contains__(self, method: str) -> bool:
        return method in self.outcomes

    def accuracy(self, method: str) -> np.ndarray:
        """%, one for each seed."""
        return np.array([outcome.accuracy for outcome in self.outcomes[method]])

    def mean(self, method: str) -> float:
        return float(self.accuracy(method).mean())

    def deficit(self, method: str, to: str = "SuperSGD") -> Interval:
        """Of accuracy, seed by seed."""
        return Interval.of(self.accuracy(to) - self.accuracy(method))

    def bits(self, method: str) -> float:
        """A coordinate, mean of the seeds."""
        return float(np.mean([outcome.bits_per_coordinate for outcome in self.outcomes[method]]))

    def error(self, method: str) -> np.ndarray:
        """Relative error of the averaged gradient, one for each seed."""
        return np.array([outcome.relative_error for outcome in self.outcomes[method]])

    def lost(self, method: str) -> int:
        """How many runs diverged."""
        return sum(outcome.diverged for outcome in self.outcomes[method])

    def known(self, methods: Iterable[str]) -> list[str]:
        return [method for method in methods if method in self.outcomes]


def scores_of(args: argparse.Namespace, outcomes: list[Outcome], task: str) -> Scores:
    """Those of the main runs of a task."""
    wanted = set(main_runs(args))
    return Scores(o for o in outcomes if o.run.task == task and o.run in wanted)


def budget_scores(args: argparse.Namespace, outcomes: list[Outcome], task: str) -> Scores:
    """Those of a task at equal wire bits, SuperSGD's of the same seeds among them."""
    wanted = set(budget_runs(args))
    return Scores(o for o in outcomes if o.run.task == task and o.run in wanted)


def variance_ratios(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """For each task each method's excess variance over SGD's minibatch variance, median of the
    steps measured on SGD's trajectory; the squared bias of clipping is counted with it."""
    ratios: dict[str, dict[str, float]] = {}
    for task, job in trajectories(args).items():
        records, of_task = job.load(args.output_dir), ratios.setdefault(task, {})
        for method in dict.fromkeys(row["method"] for row in records.rows):
            rows = [row for row in records.rows if row["method"] == method]
            added = [r["excess"] + args.workers * r["squared_bias"] for r in rows]
            of_task[method] = float(
                np.median([a / r["minibatch"] for a, r in zip(added, rows, strict=True)])
            )
    return ratios
