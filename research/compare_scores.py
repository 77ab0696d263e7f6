"""Accuracies of compare.py's runs, seed by seed, and variances on SGD's trajectory."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable

import numpy as np
from compare_runs import Outcome
from compare_studies import FIGURES_ONLY, budget_runs, main_runs, paper_runs, trajectories
from verdicts import Interval, paired

from hvd_adaptive.simulate import Records

# The loss of a model that has learnt nothing; what diverged is counted as no worse.
CHANCE = math.log(10)


class Scores:
    """How runs of one task at one setting ended, by method and in the order of the seeds."""

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

    def ahead(self, method: str, of: str) -> np.ndarray:
        """Accuracy less another method's, seed by seed."""
        return paired(self.accuracy(method), self.accuracy(of))

    def deficit(self, method: str, to: str = "SuperSGD") -> Interval:
        """Of accuracy, seed by seed."""
        return Interval.of(self.ahead(to, method))

    def training_loss(self, method: str) -> np.ndarray:
        return _up_to_chance([outcome.training_loss for outcome in self.outcomes[method]])

    def validation_loss(self, method: str) -> np.ndarray:
        return _up_to_chance([outcome.validation_loss for outcome in self.outcomes[method]])

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


def _up_to_chance(losses: list[float]) -> np.ndarray:
    return np.fmin(losses, CHANCE)


def scores_of(args: argparse.Namespace, outcomes: list[Outcome], task: str) -> Scores:
    """Those of the main runs and of the QSGD and NUQSGD papers' settings of a task."""
    wanted = {run for run in main_runs(args) if run.method not in FIGURES_ONLY}
    wanted |= set(paper_runs(args))
    return Scores(o for o in outcomes if o.run.task == task and o.run in wanted)


def budget_scores(args: argparse.Namespace, outcomes: list[Outcome], task: str) -> Scores:
    """Those of a task at equal wire bits, SuperSGD's of the same seeds among them."""
    wanted = set(budget_runs(args))
    return Scores(o for o in outcomes if o.run.task == task and o.run in wanted)


class OnTrajectory:
    """What each method adds to a gradient on SGD's own trajectory, one value a seed: the median
    over the steps, as a multiple of SGD's minibatch variance at the same step."""

    def __init__(self, records: list[Records], workers: int) -> None:
        self.records, self.workers = records, workers
        self.methods = list(dict.fromkeys(row["method"] for row in records[0].rows))

    def variance(self, method: str) -> np.ndarray:
        """Of rounding, for one worker's gradient; exact (ALQ Eq. 1)."""
        return self._median(method, lambda row: row["excess"])

    def squared_bias(self, method: str) -> np.ndarray:
        """Of clipping, in the average of all workers."""
        return self._median(method, lambda row: row["squared_bias"])

    def error(self, method: str) -> np.ndarray:
        """Mean squared error of the average of all workers' gradients."""
        return self._median(method, lambda row: row["estimator"])

    def column(self, method: str, name: str) -> np.ndarray:
        """(seeds, steps)."""
        rows = [[r[name] for r in each.rows if r["method"] == method] for each in self.records]
        return np.array(rows, dtype=float)

    def steps(self) -> list[int]:
        return [row["step"] for row in self.records[0].rows if row["method"] == self.methods[0]]

    def _median(self, method: str, value) -> np.ndarray:
        return np.array(
            [
                np.median(
                    [value(row) / row["minibatch"] for row in each.rows if row["method"] == method]
                )
                for each in self.records
            ]
        )


def on_trajectories(args: argparse.Namespace) -> dict[str, OnTrajectory]:
    """By task."""
    return {
        task: OnTrajectory([job.load(args.output_dir) for job in of_task], args.workers)
        for task, of_task in trajectories(args).items()
    }
