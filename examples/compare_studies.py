"""Which runs compare.py makes."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from compare_budgets import BUDGETS
from compare_methods import METHODS
from compare_runs import Outcome, Run
from compare_tasks import TASKS, cached_data, schedule

from hvd_adaptive import simulate

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


def budget_runs(args: argparse.Namespace) -> list[Run]:
    """Every task and method of the budgets asked for, and SuperSGD; seed by seed, so that a
    comparison broken off has whole seeds."""
    names = ["SuperSGD"] if args.budgets else []
    for budget in args.budgets:
        names += [*BUDGETS[budget].methods, *beside(args, budget)]
    return [
        Run(task, name, seed, args.workers, args.bits, args.bucket_size, args.steps or 0)
        for seed in range(args.budget_seeds)
        for task in args.task
        for name in names
    ]


def beside(args: argparse.Namespace, budget: str) -> list[str]:
    """Methods of the main runs that are told beside a budget's own."""
    return [name for name in BUDGETS[budget].beside if name in args.methods]


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
                method: METHODS[method].compressor(
                    self.task, self.bits, self.bucket_size, 0, self.steps
                )
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
