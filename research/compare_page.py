"""Tables of compare.py's runs, and the page with the papers' claims checked on them."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

import numpy as np
import verdicts
from compare_claims import check_claims
from compare_equal import equal_section
from compare_methods import FLOAT32, update_steps
from compare_paper_claims import check_fits, check_nuqsgd, check_qsgd
from compare_papers import PAPER_METHODS
from compare_runs import CURVE_SEEDS, TOLD_LOSS, Outcome
from compare_scores import OnTrajectory, Scores, on_trajectories, scores_of
from compare_studies import (
    CLIP,
    MANY_STEPS,
    SWEEP_LABELS,
    SWEEP_TASK,
    fits,
    moments,
    swept,
)
from compare_sweep_claims import check_sweeps
from compare_tables import HEADINGS, markdown, rows_of
from compare_tasks import TASKS
from verdicts import Claim

from hvd_adaptive.tools.output import print_table


def print_tables(args: argparse.Namespace, outcomes: list[Outcome]) -> None:
    """What the main runs came to."""
    for task in args.task:
        rows = rows_of(scores_of(args, outcomes, task))
        title = f"{TASKS[task].title}: {_setting(args)}, {args.seeds} seeds"
        print_table(HEADINGS, rows, title=title)


def _setting(args: argparse.Namespace) -> str:
    return f"{args.workers} workers, {args.bits} bits, bucket size {args.bucket_size}"


def write_page(args: argparse.Namespace, outcomes: list[Outcome]) -> None:
    """The page of --results."""
    scores = {task: scores_of(args, outcomes, task) for task in args.task}
    on_path = on_trajectories(args)
    images = Path(os.path.relpath(args.figures, args.results.parent)).as_posix()
    sweeps = {setting: swept(args, setting, outcomes) for setting in args.sweeps}
    of_fits = [job.load(args.output_dir) for job in fits(args)]
    parts: list[str | list[Claim]] = [
        INTRODUCTION.format(
            command=shlex.join(["python", "research/compare.py", *sys.argv[1:]]),
            setting=_setting(args),
            seeds=args.seeds,
            told_loss=TOLD_LOSS,
        ),
        "{rule}",
        "## Accuracy",
        *(section for task in args.task for section in _main_section(task, scores[task], args)),
        "## The ALQ paper's claims",
        check_claims(scores, on_path, args.bits),
        "On bucket size, bits, workers and clipping (tables below):",
        check_sweeps(sweeps),
        f"On fits ({TASKS[args.task[0]].title}, one gradient a seed):",
        check_fits(of_fits),
        *_papers_section(scores, on_path),
        *equal_section(args, outcomes, images),
        *_sweep_section(args, outcomes, images),
        "## Variance",
        *_variance_section(args, on_path, images),
        FIGURES.format(images=images, curve_seeds=CURVE_SEEDS),
    ]
    verdicts.write_page(args.results, parts)


INTRODUCTION = """# Results

Everything here is made by

    {command}

from simulated training (`hvd_adaptive.simulate`): the ranks' gradients pass through the real codec,
layout and level updates in one process.

{setting} unless stated otherwise, other keywords at their
defaults (tensors below 1,024 coordinates travel in full precision, and the last, shorter bucket
is quantised). {seeds} paired seeds: a seed gives all methods the same initial weights, and
those of equal numbers of workers the same minibatches. The deficit is SuperSGD's accuracy minus the
method's, seed by seed; its interval is Student's t over the seeds. The training loss is that of the
first {told_loss} training examples at the end; runs that diverged (a loss beyond chance, ln 10) are
counted separately there; the accuracy includes them.

- *SGD*: one worker in float32. *SuperSGD*: all workers in float32.
- *QSGD*: L2 norm, zero-based uniform levels (at 3 bits 0, ±1/3, ±2/3, ±1).
- *QSGDinf*: L∞ norm, 2^bits uniform levels without zero; *NUQSGD*: L2 norm, ±1, ±1/2, ±1/4, ...,
  without zero; both as the ALQ paper runs them.
- *TernGrad*: three levels, L∞ norm, clipped at 2.5 deviations.
- *ALQ*, *AMQ*: L2 norm. *-N* minimises the normalized variance. *ALQG* descends by gradients to the
  tables that ALQ finds; it is in the figures only.

These are small networks, trained for some hundred steps on small images. They show differences
between methods, but are not the papers' CIFAR-10 and ImageNet. [One page](papers.md) lists each
claim of the papers, where it is tested, and the verdict.
"""

PAPERS = """## The QSGD and NUQSGD papers' claims

Methods by bits and bucket size, as these papers run them: *QSGDinf* with zero-based levels,
*NUQSGD* with 0, ..., 1/4, 1/2, 1 (`symmetric=False`) and *QSGD* with uniform levels under the L2
norm. The QSGD paper trains with 8 GPUs; here there are 4 workers.
"""

FIGURES = """## The ALQ paper's figures on these tasks

Fig. 1: variance, between minibatches, of coordinates divided by their bucket's L2 norm, times the
bucket size, in SuperSGD's training: 1 where minibatches have nothing in common.

![normalised variance]({images}/normalized_variance.png)

Fig. 3: validation loss and accuracy, mean of the first {curve_seeds} seeds. A line that ends has
diverged.

![loss and accuracy]({images}/loss_and_accuracy.png)

Fig. 4: variance of the averaged gradient in each method's own training, mean of the first
{curve_seeds} seeds: of the minibatches, of quantisation (exactly, Eq. 1) and of the clipping's
bias, over the number of workers as far as that divides it.

![variance in training]({images}/variance_in_training.png)

Fig. 6: levels at the end of training, first seed.

![levels]({images}/final_levels.png)

Fig. 8: the objective during one update of the table, first seed.

![fits]({images}/fits.png)
"""


def _main_section(task: str, scores: Scores, args: argparse.Namespace) -> list[str]:
    chosen = TASKS[task]
    steps = args.steps or chosen.steps
    told = (
        f"{steps} steps, {chosen.batch_size} examples a worker and step, rate {chosen.rate:g} cut "
        f"tenfold at 9/16 and 3/4, momentum {chosen.momentum:g}, weight decay "
        f"{chosen.weight_decay:g}; tables are refitted at steps "
        f"{', '.join(map(str, update_steps(steps)))}."
    )
    rows = [row for row in rows_of(scores) if row[0] not in PAPER_METHODS]
    return [f"### {chosen.title}", told, chosen.note, markdown(HEADINGS, rows)]


def _papers_section(
    scores: dict[str, Scores], on_path: dict[str, OnTrajectory]
) -> list[str | list[Claim]]:
    claims = check_qsgd(scores) + check_nuqsgd(scores, on_path)
    if not claims:
        return []
    tables = [
        markdown((TASKS[task].title, *HEADINGS[1:]), rows)
        for task, each in scores.items()
        if (rows := [row for row in rows_of(each) if row[0] in PAPER_METHODS])
    ]
    return [PAPERS, *tables, claims]


def _sweep_section(args: argparse.Namespace, outcomes: list[Outcome], images: str) -> list[str]:
    if not args.sweeps:
        return []
    parts = [
        f"## Against {', '.join(SWEEP_LABELS[setting] for setting in args.sweeps)}",
        f"{TASKS[SWEEP_TASK].title}: mean accuracy in % ± its standard error, {args.seeds} seeds. "
        f"Runs with many workers have 1/{MANY_STEPS} of the steps. Clipped: at {CLIP:g} "
        "deviations, as TernGrad always is.",
    ]
    for setting in args.sweeps:
        sweep = swept(args, setting, outcomes)
        if not sweep:
            continue
        values = sorted(next(iter(sweep.values())))
        rows = []
        for method, row in sweep.items():
            if setting != "workers" and method in FLOAT32:
                continue
            cells = []
            for value in values:
                accuracy = np.array([outcome.accuracy for outcome in row[value]])
                many = len(accuracy) > 1
                error = accuracy.std(ddof=1) / np.sqrt(len(accuracy)) if many else float("nan")
                cells.append(f"{accuracy.mean():.2f} ± {error:.2f}")
            rows.append([method, *cells])
        label = SWEEP_LABELS[setting]
        parts.append(f"{label.capitalize()}:")
        parts.append(markdown([label, *map(str, values)], rows))
    return [*parts, f"![accuracy against each of them]({images}/sweeps.png)"]


def _variance_section(
    args: argparse.Namespace, on_path: dict[str, OnTrajectory], images: str
) -> list[str]:
    told = (
        "Along float32 SGD, every method on the same gradients (the ALQ paper's Fig. 5), as "
        "multiples of SGD's minibatch variance: medians of the steps, means of the seeds with "
        "their 95% interval. *added*: variance that quantisation adds to one worker's gradient, "
        "exactly (Eq. 1). *squared bias*: of clipping, in the average. *error*: mean squared error "
        f"of the average of {args.workers} workers: SGD's variance and the added one are divided "
        "by their number, the bias is not."
    )
    parts = [told]
    for task, path in on_path.items():
        rows = [
            [m, *(_told(of(m)) for of in (path.variance, path.squared_bias, path.error))]
            for m in path.methods
        ]
        steps = ", ".join(map(str, moments(args.steps or TASKS[task].steps)))
        heads = (f"{TASKS[task].title}, steps {steps}", "added", "squared bias", "error")
        parts.append(markdown(heads, rows))
    return [*parts, f"![variance on the trajectory]({images}/variance_on_trajectory.png)"]


def _told(values: np.ndarray) -> str:
    if not values.any():
        return "0"
    interval = verdicts.Interval.of(values)
    return f"{interval.mean:.3g} ± {interval.half:.2g}"
