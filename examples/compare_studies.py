"""Which runs compare.py makes, and which figures it draws from them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import compare_figures as figures
import numpy as np
import torch
from compare_runs import (
    CURVE_SEEDS,
    METHODS,
    TASKS,
    Outcome,
    Run,
    cached_data,
    make_compressor,
    schedule,
)

from hvd_adaptive import simulate
from hvd_adaptive.levels import (
    STARTS,
    Histogram,
    coordinate_descent,
    expected_variance,
    exponential_magnitudes,
    gradient_descent,
)
from hvd_adaptive.levels.multiplier import multiplier_gradient
from hvd_adaptive.settings import Settings
from hvd_adaptive.statistics import HistogramStatistic

SWEEP_TASK = "resnet8"
SWEEPS = {
    "bucket_size": (128, 512, 2048, 8192, 32768),
    "bits": (2, 3, 4, 6),
    "workers": (1, 4, 16, 32),
}
SWEEP_LABELS = {"bucket_size": "bucket size", "bits": "bits", "workers": "workers"}
# Gradient descent finds what coordinate descent does: these vary in Figs 6 and 8 only.
NOT_SWEPT = ("SGD", "ALQG", "ALQG-N")
TRAJECTORY_POINTS = 14
Sweep = dict[str, dict[int, list[Outcome]]]


def main_runs(args: argparse.Namespace) -> list[Run]:
    """Every task, method and seed at one setting."""
    return [
        Run(task, method, seed, args.workers, args.bits, args.bucket_size, args.steps or 0)
        for seed in range(args.seeds)
        for task in args.task
        for method in args.methods
    ]


def sweep_runs(args: argparse.Namespace) -> list[Run]:
    """Those of SWEEP_TASK in which one setting varies."""
    return [
        run
        for setting in args.sweeps
        for row in _sweep(args, setting).values()
        for runs in row.values()
        for run in runs
    ]


def swept(args: argparse.Namespace, setting: str, outcomes: list[Outcome]) -> Sweep:
    """{method: {value: outcomes of the seeds}}; empty where that was not asked for."""
    if setting not in args.sweeps:
        return {}
    found = {outcome.run: outcome for outcome in outcomes}
    return {
        method: {value: [found[run] for run in runs] for value, runs in row.items()}
        for method, row in _sweep(args, setting).items()
    }


def _sweep(args: argparse.Namespace, setting: str) -> dict[str, dict[int, list[Run]]]:
    fixed = {"workers": args.workers, "bits": args.bits, "bucket_size": args.bucket_size}
    # TernGrad has no bits to vary, and 32 workers take long.
    left_out = NOT_SWEPT + {"bits": ("TernGrad",), "workers": ("QSGD",)}.get(setting, ())
    seeds = max(1, args.sweep_seeds // 2) if setting == "workers" else args.sweep_seeds
    return {
        method: {
            value: [
                Run(SWEEP_TASK, method, seed, **fixed | {setting: value}, steps=args.steps or 0)
                for seed in range(seeds)
            ]
            for value in SWEEPS[setting]
        }
        for method in args.methods
        if method not in left_out
    }


@dataclass(frozen=True)
class Trajectory:
    """Variance of all methods along one task's float32 SGD."""

    task: str
    methods: tuple[str, ...]
    workers: int
    bits: int
    bucket_size: int
    steps: int

    def path(self, folder: Path) -> Path:
        """The file of its records."""
        settings = f"{self.workers}w-{self.bits}b-{self.bucket_size}d-{self.steps}t"
        return folder / self.task / f"trajectory-{settings}.csv"

    @property
    def settings(self) -> dict[str, Any]:
        """As Run.settings."""
        return Run(self.task, "SGD", 0, steps=self.steps).settings | {"methods": list(self.methods)}

    def load(self, folder: Path) -> simulate.Records | None:
        """As Run.load."""
        try:
            records = simulate.Records.read(self.path(folder))
        except (OSError, ValueError):
            return None
        return records if records.settings.get("run") == self.settings else None

    def execute(self, folder: Path) -> None:
        """As Run.execute."""
        task = TASKS[self.task]
        torch.manual_seed(0)
        every = max(1, self.steps // TRAJECTORY_POINTS)
        records = simulate.variance_on_trajectory(
            task.model(),
            cached_data(self.task)[0],
            {
                method: make_compressor(method, self.bits, self.bucket_size, 0, self.steps)
                for method in self.methods
                if METHODS[method].make is not None
            },
            optimizer=task.optimizer,
            schedule=lambda optimizer: schedule(optimizer, self.steps),
            steps=range(0, self.steps, every),
            workers=max(2, self.workers),
            batch_size=task.batch_size,
            progress=False,
        )
        records.settings["run"] = self.settings
        records.write(self.path(folder))


def trajectories(args: argparse.Namespace) -> dict[str, Trajectory]:
    """By task."""
    return {
        task: Trajectory(task, tuple(args.methods), args.workers, args.bits, args.bucket_size,
                         args.steps or TASKS[task].steps)
        for task in args.task
    }  # fmt: skip


def draw_figures(args: argparse.Namespace, outcomes: list[Outcome]) -> None:
    """All figures that the runs allow, into ``args.figures``."""
    folder, runs = args.figures, args.output_dir
    titles = {task: TASKS[task].title for task in args.task}
    on_path = {titles[task]: job.load(runs) for task, job in trajectories(args).items()}
    figures.trajectory(on_path, folder / "variance_on_trajectory.png")

    curves: dict[str, dict[str, list[simulate.Result]]] = {}
    for run in main_runs(args):
        if run.seed < CURVE_SEEDS:
            results = curves.setdefault(titles[run.task], {}).setdefault(run.method, [])
            results.append(run.load(runs))
    figures.training_variance(curves, folder / "variance_in_training.png")
    figures.loss_and_accuracy(curves, folder / "loss_and_accuracy.png")
    exact = {title: methods["SuperSGD"] for title, methods in curves.items()
             if "SuperSGD" in methods}  # fmt: skip
    if exact:
        size = Settings().bucket_size  # of float32 ranks
        figures.normalized_variance(exact, size, folder / "normalized_variance.png")

    title, methods = next(iter(curves.items()))
    tables = {name: results[0].tables[-1]["levels"] for name, results in methods.items()
              if results[0].tables}  # fmt: skip
    figures.final_levels(tables, f"{title}: levels at the end", folder / "final_levels.png")
    figures.fits(fit_histories(args.task[0], args.bits, args.bucket_size), folder / "fits.png")
    if args.sweeps:
        draw_sweeps(args, outcomes)


def draw_sweeps(args: argparse.Namespace, outcomes: list[Outcome]) -> None:
    """Accuracy against each swept setting."""
    values = {
        setting: {
            method: {value: _mean_and_error(found) for value, found in row.items()}
            for method, row in swept(args, setting, outcomes).items()
        }
        for setting in args.sweeps
    }
    best = max(mean for methods in values.values() for row in methods.values()
               for mean, _ in row.values())  # fmt: skip
    figures.sweep(values, SWEEP_LABELS, best - 6, args.figures / "sweeps.png")


def _mean_and_error(outcomes: list[Outcome]) -> tuple[float, float]:
    accuracies = np.array([outcome.accuracy for outcome in outcomes])
    spread = accuracies.std(ddof=1) if len(accuracies) > 1 else 0.0
    return float(accuracies.mean()), float(spread / np.sqrt(len(accuracies)))


def fit_histories(task: str, bits: int, bucket_size: int) -> dict[str, dict[str, np.ndarray]]:
    """The objective during one fit, on a gradient of a model in the middle of its training."""
    torch.manual_seed(0)
    chosen, train = TASKS[task], cached_data(task)[0]
    model = chosen.model()
    simulate.train(model, train, optimizer=chosen.optimizer, workers=1, steps=40,
                   batch_size=chosen.batch_size, progress=False)  # fmt: skip
    model.zero_grad()
    torch.nn.functional.cross_entropy(model(train[0][:64]), train[1][:64]).backward()
    flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    buckets = flat[: len(flat) // bucket_size * bucket_size].split(bucket_size) or (flat,)
    buckets = [bucket for bucket in buckets if bucket.any()]
    statistic = HistogramStatistic()
    collected = statistic.collect(buckets, [float(bucket.norm()) for bucket in buckets])
    titles = {False: "expected variance (ALQ, ALQG, AMQ)",
              True: "expected normalized variance (-N)"}  # fmt: skip
    return {
        title: _histories(statistic.pool([collected], normalized), 1 << (bits - 1))
        for normalized, title in titles.items()
    }


def _histories(law: Histogram, count: int) -> dict[str, np.ndarray]:
    starts = ("uniform", "exponential", "quantile")
    solvers = {"coordinate descent": coordinate_descent, "gradient descent": gradient_descent}
    histories = {
        f"{name}, {start} start": solve(STARTS[start](law, count, True), law, True).history
        for name, solve in solvers.items()
        for start in starts
    }
    return histories | {f"AMQ, p = {p} at first": _amq(law, count, p) for p in (0.2, 0.5, 0.9)}


def _amq(law: Histogram, count: int, p: float, steps: int = 60) -> np.ndarray:
    """Psi along descent on the multiplier (ALQ Eq. 8), halving steps that would climb."""

    def objective(p: float) -> float:
        return float(expected_variance(exponential_magnitudes(count, p, True), law, True))

    history, size = [objective(p)], 0.1
    for _ in range(steps):
        trial = p - size * p * (1 - p) * np.sign(multiplier_gradient(p, law, count))
        value = objective(trial)
        if value < history[-1]:
            p, size = trial, 1.2 * size
        else:
            size /= 2
        history.append(min(value, history[-1]))
    return np.array(history)
