"""All figures of compare.py's page, from its runs."""

from __future__ import annotations

import argparse

import compare_figures as figures
import numpy as np
from compare_equal_figure import against_bits
from compare_fits import histories_of
from compare_runs import CURVE_SEEDS, Outcome
from compare_scores import budget_scores
from compare_studies import (
    SWEEP_LABELS,
    budget_tasks,
    fits,
    main_runs,
    swept,
    trajectories,
)
from compare_tasks import TASKS

from hvd_adaptive import simulate
from hvd_adaptive.settings import Settings


def draw_figures(args: argparse.Namespace, outcomes: list[Outcome]) -> None:
    """All figures that the runs allow, into ``args.figures``."""
    folder, runs = args.figures, args.output_dir
    titles = {task: TASKS[task].title for task in args.task}
    on_path = {
        titles[task]: [job.load(runs) for job in of_task]
        for task, of_task in trajectories(args).items()
    }
    figures.trajectory(on_path, folder / "variance_on_trajectory.png")

    curves: dict[str, dict[str, list[simulate.Result]]] = {}
    for run in main_runs(args):
        if run.seed < CURVE_SEEDS:
            results = curves.setdefault(titles[run.task], {}).setdefault(run.method, [])
            results.append(run.load(runs))
    figures.training_variance(curves, folder / "variance_in_training.png")
    figures.loss_and_accuracy(curves, folder / "loss_and_accuracy.png")
    exact = {
        title: methods["SuperSGD"] for title, methods in curves.items() if "SuperSGD" in methods
    }
    if exact:
        size = Settings().bucket_size  # of float32 ranks
        figures.normalized_variance(exact, size, folder / "normalized_variance.png")

    title, methods = next(iter(curves.items()))
    tables = {
        name: results[0].tables[-1]["levels"]
        for name, results in methods.items()
        if results[0].tables
    }
    figures.final_levels(tables, f"{title}: levels at the end", folder / "final_levels.png")
    figures.fits(histories_of(fits(args)[0].load(runs)), folder / "fits.png")
    if args.sweeps:
        draw_sweeps(args, outcomes)
    if args.budgets and budget_tasks(args):
        scores = {titles[t]: budget_scores(args, outcomes, t) for t in budget_tasks(args)}
        against_bits(scores, folder / "equal_bits.png")


def draw_sweeps(args: argparse.Namespace, outcomes: list[Outcome]) -> None:
    """Accuracy against each swept setting."""
    values = {
        setting: {
            method: {value: _mean_and_error(found) for value, found in row.items()}
            for method, row in swept(args, setting, outcomes).items()
        }
        for setting in args.sweeps
    }
    best = max(
        mean for methods in values.values() for row in methods.values() for mean, _ in row.values()
    )
    figures.sweep(values, SWEEP_LABELS, best - 6, args.figures / "sweeps.png")


def _mean_and_error(outcomes: list[Outcome]) -> tuple[float, float]:
    accuracies = np.array([outcome.accuracy for outcome in outcomes])
    spread = accuracies.std(ddof=1) if len(accuracies) > 1 else 0.0
    return float(accuracies.mean()), float(spread / np.sqrt(len(accuracies)))
