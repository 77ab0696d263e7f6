"""SGD, SuperSGD and every quantised method on real data, in one process: no Horovod, no MPI.

python research/compare.py --task lenet --seeds 5                    # a table
python research/compare.py --task lenet fc --figures figures         # ... and figures
python research/compare.py --results docs/results.md --jobs 2        # everything that page tells

Each finished run is a CSV file in --output-dir, with the settings that made it, and is not made
again while these stay the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from compare_budgets import BUDGETS
from compare_methods import METHODS
from compare_runs import Outcome
from compare_studies import (
    SWEEPS,
    budget_runs,
    fits,
    main_runs,
    paper_runs,
    sweep_runs,
    trajectories,
)
from compare_tasks import TASKS, cached_data
from tqdm import tqdm

from hvd_adaptive.tools.output import script_parser, whole


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = script_parser(__doc__)
    what = parser.add_argument_group("what is compared")
    what.add_argument(
        "--task",
        nargs="+",
        choices=TASKS,
        default=list(TASKS),
        metavar="TASK",
        help=f"of {', '.join(TASKS)} (all)",
    )
    what.add_argument(
        "--methods",
        nargs="+",
        choices=METHODS,
        default=list(METHODS),
        metavar="METHOD",
        help=f"of {', '.join(METHODS)} (all)",
    )
    what.add_argument("--seeds", type=whole(1), default=20, help="paired runs of each (20)")
    what.add_argument("--workers", type=whole(1), default=4)
    what.add_argument("--bits", type=whole(1), default=3)
    what.add_argument("--bucket-size", type=whole(1), default=8192)
    length = what.add_mutually_exclusive_group()
    length.add_argument("--steps", type=whole(1), help="of a run (the task's own)")
    length.add_argument("--epochs", type=whole(1), help="the same in passes over the data")
    what.add_argument("--rate", type=float, help="learning rate (the task's own)")
    what.add_argument(
        "--sweeps",
        nargs="*",
        choices=SWEEPS,
        metavar="SETTING",
        help=f"vary one of {', '.join(SWEEPS)} as well",
    )
    what.add_argument(
        "--budgets",
        nargs="*",
        choices=BUDGETS,
        metavar="BITS",
        help=f"compare methods at equal wire bits a coordinate as well, of {', '.join(BUDGETS)}",
    )
    what.add_argument(
        "--papers", action="store_true", help="run the QSGD and NUQSGD papers' settings as well"
    )

    how = parser.add_argument_group("output")
    how.add_argument("--output-dir", type=Path, default=Path("runs/compare"))
    how.add_argument("--jobs", type=whole(1), default=1, help="processes, one thread each (1)")
    how.add_argument("--figures", type=Path, metavar="DIR", help="draw the figures there")
    how.add_argument(
        "--results",
        type=Path,
        metavar="PAGE",
        help="write a page in Markdown, with figures and all sweeps",
    )
    return parser


def main() -> int | str:
    """Make what is missing, show what there is; returns what sys.exit takes."""
    args = make_parser().parse_args()
    if args.results:
        args.sweeps = list(SWEEPS) if args.sweeps is None else args.sweeps
        args.figures = args.figures or args.results.parent / "images"
        args.budgets = list(BUDGETS) if args.budgets is None else args.budgets
        args.papers = True
    args.sweeps, args.budgets = args.sweeps or [], args.budgets or []
    torch.set_num_threads(1)
    # A killed comparison must not leave its processes behind: this makes `finally` clauses run.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if args.rate:
        for name in args.task:
            TASKS[name] = dataclasses.replace(TASKS[name], rate=args.rate, note="")
    if args.epochs:
        for name in args.task:
            _set_epochs(name, args.epochs, args.workers)
    runs = main_runs(args) + paper_runs(args) + sweep_runs(args) + budget_runs(args)
    jobs: list[Any] = list(dict.fromkeys(runs))
    if args.figures:
        jobs += [job for of_task in trajectories(args).values() for job in of_task] + fits(args)
    jobs = [job for job in jobs if job.load(args.output_dir) is None]
    failed = execute(jobs, args.output_dir, args.jobs)
    if failed:
        return "\n".join(failed)
    outcomes = [Outcome.of(run, run.load(args.output_dir)) for run in dict.fromkeys(runs)]

    from compare_page import print_tables, write_page

    print_tables(args, outcomes)
    if args.figures:
        from compare_draw import draw_figures

        draw_figures(args, outcomes)
    if args.results:
        write_page(args, outcomes)
    return 0


def _set_epochs(name: str, epochs: int, workers: int) -> None:
    task, examples = TASKS[name], len(cached_data(name)[0][1])
    steps = max(1, epochs * examples // (task.batch_size * workers))
    TASKS[name] = dataclasses.replace(task, steps=steps)


def execute(jobs: Sequence[Any], folder: Path, processes: int) -> list[str]:
    """Make runs and trajectories; returns a line for each that failed."""
    failed: list[str] = []
    os.environ["OMP_NUM_THREADS"] = "1"
    pool = ProcessPoolExecutor(processes, get_context("spawn"), _one_thread, (TASKS,))
    bar = tqdm(total=len(jobs), unit="run", disable=None)
    try:
        futures = {pool.submit(job.execute, folder): job for job in jobs}
        for future in as_completed(futures):
            if future.exception() is not None:
                failed.append(f"{futures[future]}: {future.exception()!r}")
            bar.update()
    finally:
        # Nothing is left to do where all went well; else what waits is dropped.
        pool.shutdown(cancel_futures=True)
        bar.close()
    return failed


def _one_thread(tasks: dict) -> None:
    torch.set_num_threads(1)
    TASKS.update(tasks)


if __name__ == "__main__":
    sys.exit(main())
