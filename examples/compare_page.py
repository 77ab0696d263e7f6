"""Tables of compare.py's runs, and the page with the papers' claims checked on them."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

import numpy as np
from compare_claims import check_claims
from compare_equal import equal_section
from compare_methods import FLOAT32, update_steps
from compare_runs import CURVE_SEEDS, TOLD_LOSS, Outcome
from compare_scores import Scores, scores_of, variance_ratios
from compare_studies import SWEEP_LABELS, SWEEP_TASK, swept
from compare_tables import HEADINGS, markdown, rows_of
from compare_tasks import TASKS
from rich.console import Console
from rich.table import Table


def print_tables(args: argparse.Namespace, outcomes: list[Outcome], console: Console) -> None:
    """What the main runs came to."""
    for task in args.task:
        table = Table(title=f"{TASKS[task].title}: {_setting(args)}, {args.seeds} seeds")
        for number, heading in enumerate(HEADINGS):
            table.add_column(heading, justify="right" if number else "left")
        for row in rows_of(scores_of(args, outcomes, task)):
            table.add_row(*row)
        console.print(table)


def _setting(args: argparse.Namespace) -> str:
    return f"{args.workers} workers, {args.bits} bits, bucket size {args.bucket_size}"


def write_page(args: argparse.Namespace, outcomes: list[Outcome]) -> None:
    """The page of --results."""
    scores = {task: scores_of(args, outcomes, task) for task in args.task}
    images = Path(os.path.relpath(args.figures, args.results.parent)).as_posix()
    parts = [
        INTRODUCTION.format(
            command=shlex.join(["python", "examples/compare.py", *sys.argv[1:]]),
            setting=_setting(args),
            seeds=args.seeds,
            told_loss=TOLD_LOSS,
        ),
        "## Accuracy\n",
        *(section for task in args.task for section in _main_section(task, scores[task], args)),
        "## The papers' claims, checked\n",
        *check_claims(args, scores, outcomes),
        *equal_section(args, outcomes, images),
        *_sweep_section(args, outcomes, images),
        "## Variance\n",
        *_variance_section(args, images),
        FIGURES.format(images=images, curve_seeds=CURVE_SEEDS),
    ]
    args.results.parent.mkdir(parents=True, exist_ok=True)
    args.results.write_text("\n".join(parts), encoding="utf-8")


INTRODUCTION = """# Results

Everything here is made by

    {command}

from simulated training (`hvd_adaptive.simulate`): the ranks' gradients pass through the real codec,
layout and level updates in one process.

{setting} unless told otherwise, the other keywords at their
defaults (tensors below 1,024 coordinates travel in full precision, and the last, shorter bucket
is quantised). {seeds} paired seeds: a seed gives all methods the same initial weights, and
those of equal numbers of workers the same minibatches. The deficit is SuperSGD's accuracy minus the
method's, seed by seed; its interval is Student's t over the seeds. The training loss is that of the
first {told_loss} training examples at the end; runs that diverged (a loss beyond chance, ln 10) are
counted apart there, and count as they are in the accuracy.

- *SGD*: one worker in float32. *SuperSGD*: all workers in float32.
- *QSGD*: L2 norm, zero-based uniform levels (at 3 bits 0, ±1/3, ±2/3, ±1).
- *QSGDinf*: L∞ norm, 2^bits uniform levels without zero; *NUQSGD*: L2 norm, ±1, ±1/2, ±1/4, ...,
  without zero; both as the ALQ paper runs them.
- *TernGrad*: three levels, L∞ norm, clipped at 2.5 deviations.
- *ALQ*, *AMQ*: L2 norm. *-N* minimises the normalized variance, *ALQG* descends by gradients.

These are small networks, trained for some hundred steps on small images: they tell methods apart,
but are not the papers' CIFAR-10 and ImageNet.
"""

FIGURES = """## The ALQ paper's figures on these tasks

Fig. 1: variance, between minibatches, of coordinates divided by their bucket's L2 norm, times the
bucket size, in SuperSGD's training: 1 where minibatches have nothing in common.

![normalised variance]({images}/normalized_variance.png)

Fig. 3: validation loss and accuracy, mean of the first {curve_seeds} seeds. A line that ends has
diverged.

![loss and accuracy]({images}/loss_and_accuracy.png)

Fig. 4: variance of the averaged gradient in each method's own training: of the minibatches, of
quantisation (exactly, Eq. 1) and of the clipping's bias, over the number of workers as far as that
divides it.

![variance in training]({images}/variance_in_training.png)

Fig. 6: levels at the end of training.

![levels]({images}/final_levels.png)

Fig. 8: the objective during one update of the table.

![fits]({images}/fits.png)
"""


def _main_section(task: str, scores: Scores, args: argparse.Namespace) -> list[str]:
    chosen = TASKS[task]
    steps = args.steps or chosen.steps
    told = (
        f"{steps} steps, {chosen.batch_size} examples a worker and step, rate {chosen.rate:g} cut "
        f"tenfold at 9/16 and 3/4, momentum {chosen.momentum:g}, weight decay "
        f"{chosen.weight_decay:g}; tables are refitted at steps "
        f"{', '.join(map(str, update_steps(steps)))}.\n"
    )
    told += f"\n{chosen.note}" if chosen.note else ""
    return [f"### {chosen.title}\n", told, markdown(HEADINGS, rows_of(scores))]


def _sweep_section(args: argparse.Namespace, outcomes: list[Outcome], images: str) -> list[str]:
    if not args.sweeps:
        return []
    parts = [
        f"## Against {', '.join(SWEEP_LABELS[setting] for setting in args.sweeps)}\n",
        f"{TASKS[SWEEP_TASK].title}: mean accuracy in % ± its standard error.\n",
    ]
    for setting in args.sweeps:
        sweep = swept(args, setting, outcomes)
        if not sweep:
            continue
        values = sorted(next(iter(sweep.values())))
        seeds = len(next(iter(sweep.values()))[values[0]])
        rows = []
        for method, row in sweep.items():
            if setting != "workers" and method in FLOAT32:
                continue
            cells = []
            for value in values:
                accuracy = np.array([outcome.accuracy for outcome in row[value]])
                error = accuracy.std(ddof=1) / np.sqrt(seeds) if seeds > 1 else float("nan")
                cells.append(f"{accuracy.mean():.2f} ± {error:.2f}")
            rows.append([method, *cells])
        label = SWEEP_LABELS[setting]
        parts.append(f"{label.capitalize()}, {seeds} seeds:\n")
        parts.append(markdown([label, *map(str, values)], rows))
    return [*parts, f"![accuracy against each of them]({images}/sweeps.png)\n"]


def _variance_section(args: argparse.Namespace, images: str) -> list[str]:
    ratios = variance_ratios(args)
    methods = [m for m in next(iter(ratios.values())) if m not in FLOAT32]
    rows = [[m, *(f"{of_task[m]:.3g}" for of_task in ratios.values())] for m in methods]
    told = (
        "Along float32 SGD, every method on the same gradients (the ALQ paper's Fig. 5): what "
        "quantisation adds to one worker's gradient, exactly (Eq. 1), as a multiple of SGD's "
        "minibatch variance; the median of the steps. Clipping's squared bias, which averaging "
        f"over {args.workers} workers does not divide, is counted with it, times their number.\n"
    )
    return [told, markdown(["method", *(TASKS[task].title for task in ratios)], rows),
            f"![variance on the trajectory]({images}/variance_on_trajectory.png)\n"]  # fmt: skip
