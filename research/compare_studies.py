"""Which runs compare.py makes."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from compare_budgets import BUDGETS
from compare_fits import Fits
from compare_papers import ALL_METHODS, NUQSGD_TRIO, PAPER_METHODS, PAPER_TASKS
from compare_runs import Outcome, Run
from compare_tasks import TASKS, cached_data, schedule
from kept_run import KeptRun

from hvd_adaptive import simulate

SWEEP_TASK = "resnet8"
SWEEPS: dict[str, tuple[int, ...]] = {
    "bucket_size": (64, 100, 8192, 32768),
    "bits": (2, 3, 4),
    "workers": (16, 32),
    "clip": (64, 32768),
}
# From and to which bucket size a loss of accuracy is told.
SMALL, LARGE = 100, 32768
SWEEP_LABELS = {
    "bucket_size": "bucket size",
    "bits": "bits",
    "workers": "workers",
    "clip": "bucket size, clipped",
}
# That of TernGrad, which the ALQ paper applies to all methods in its Fig. 14.
CLIP = 2.5
# Gradient descent finds what coordinate descent does: these are in the figures only.
NOT_SWEPT = ("SGD", "ALQG", "ALQG-N")
# TernGrad has no bits to vary and is clipped always; many workers take long.
LEFT_OUT = {
    "bits": ("SuperSGD", "TernGrad"),
    "bucket_size": ("SuperSGD",),
    "clip": ("SuperSGD", "TernGrad", "QSGD"),
    "workers": ("QSGD", "ALQ-N", "AMQ-N"),
}
# Runs with many workers have this share of the task's steps: each sees most of the examples.
MANY_STEPS = 4
# Methods at equal bits are compared on these tasks.
BUDGET_TASKS = ("lenet", "resnet8")
# ALQG and ALQG-N are there for the figures of the first seeds.
FIGURES_ONLY = ("ALQG", "ALQG-N")
FIGURE_SEEDS = 2
Sweep = dict[str, dict[int, list[Outcome]]]


def main_runs(args: argparse.Namespace) -> list[Run]:
    """Every task, method and seed at one setting."""
    return [
        Run(task, method, seed, args.workers, args.bits, args.bucket_size, args.steps or 0)
        for seed in range(args.seeds)
        for task in args.task
        for method in args.methods
        if seed < FIGURE_SEEDS or method not in FIGURES_ONLY
    ]


def paper_runs(args: argparse.Namespace) -> list[Run]:
    """The QSGD and NUQSGD papers' settings, beside the main runs."""
    return [
        Run(task, method, seed, args.workers, args.bits, args.bucket_size, args.steps or 0)
        for seed in range(args.seeds)
        for task in args.task
        if task in PAPER_TASKS
        for method in (PAPER_METHODS if args.papers else ())
    ]


def budget_runs(args: argparse.Namespace) -> list[Run]:
    """Every task and method of the budgets asked for, and SuperSGD; seed by seed, so that a
    comparison broken off has whole seeds."""
    names = ["SuperSGD"] if args.budgets else []
    for budget in args.budgets:
        names += [*BUDGETS[budget].methods, *beside(args, budget)]
    return [
        Run(task, name, seed, args.workers, args.bits, args.bucket_size, args.steps or 0)
        for seed in range(args.seeds)
        for task in budget_tasks(args)
        for name in names
    ]


def budget_tasks(args: argparse.Namespace) -> list[str]:
    """Those of the tasks on which methods at equal bits are compared."""
    return [task for task in args.task if task in BUDGET_TASKS]


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
    steps = args.steps or TASKS[SWEEP_TASK].steps
    fixed: dict[str, Any] = {
        "workers": args.workers,
        "bits": args.bits,
        "bucket_size": args.bucket_size,
        "steps": steps,
    }

    def of(value: int) -> dict[str, Any]:
        if setting == "clip":
            return fixed | {"clip": CLIP, "bucket_size": value}
        if setting == "workers":
            return fixed | {"workers": value, "steps": max(1, steps // MANY_STEPS)}
        return fixed | {setting: value}

    left_out = NOT_SWEPT + LEFT_OUT[setting]
    return {
        method: {
            value: [Run(SWEEP_TASK, method, seed, **of(value)) for seed in range(args.seeds)]
            for value in SWEEPS[setting]
        }
        for method in args.methods
        if method not in left_out
    }


def moments(steps: int) -> list[int]:
    """Steps at which variances are measured: the first, early, before and after the first cut of
    the rate, the last. Each takes long, so there are few of them, and many seeds."""
    cut = 9 * steps // 16
    return sorted({0, steps // 6, cut - 1, min(cut + steps // 8, steps - 1), steps - 1} - {-1})


@dataclass(frozen=True)
class Trajectory(KeptRun):
    """Variance of all methods along one task's float32 SGD, from one seed's weights."""

    reads = simulate.Records.read

    task: str
    methods: tuple[str, ...]
    workers: int
    bits: int
    bucket_size: int
    steps: int
    seed: int

    def path(self, folder: Path) -> Path:
        """The file of its records."""
        settings = f"{self.workers}w-{self.bits}b-{self.bucket_size}d-{self.steps}t-{self.seed}"
        return folder / self.task / f"trajectory-{settings}.csv"

    @property
    def settings(self) -> dict[str, Any]:
        """As Run.settings."""
        run = Run(self.task, "SGD", self.seed, steps=self.steps)
        return run.settings | {"methods": list(self.methods)}

    def execute(self, folder: Path) -> None:
        """As Run.execute."""
        task = TASKS[self.task]
        torch.manual_seed(self.seed)
        records = simulate.variance_on_trajectory(
            task.model(),
            cached_data(self.task)[0],
            {
                method: ALL_METHODS[method].compressor(
                    self.task, self.bits, self.bucket_size, self.seed, self.steps, None
                )
                for method in self.methods
                if ALL_METHODS[method].make is not None
            },
            optimizer=task.optimizer,
            schedule=lambda optimizer: schedule(optimizer, self.steps),
            steps=moments(self.steps),
            workers=max(2, self.workers),
            batch_size=task.batch_size,
            seed=self.seed,
            progress=False,
        )
        records.settings["run"] = self.settings
        records.write(self.path(folder))


def trajectories(args: argparse.Namespace) -> dict[str, list[Trajectory]]:
    """By task, one for each seed."""
    return {
        task: [
            Trajectory(
                task,
                _on_trajectory(args, task),
                args.workers,
                args.bits,
                args.bucket_size,
                args.steps or TASKS[task].steps,
                seed,
            )
            for seed in range(args.seeds)
        ]
        for task in args.task
    }


def fits(args: argparse.Namespace) -> list[Fits]:
    """On the first task, one for each seed."""
    return [Fits(args.task[0], args.bits, args.bucket_size, seed) for seed in range(args.seeds)]


def _on_trajectory(args: argparse.Namespace, task: str) -> tuple[str, ...]:
    """Gradient descent's tables are coordinate descent's, so these are not measured twice."""
    own = [method for method in args.methods if method not in FIGURES_ONLY]
    return (*own, *(NUQSGD_TRIO if args.papers and task == SWEEP_TASK else ()))
