"""What the defaults, and schemes without a zero level, do in training: two ranks in one process.

    python research/defaults.py                                      # tables
    python research/defaults.py --page docs/defaults.md --jobs 2     # ... and the page

Rows of an embedding that no rank uses must not move, and level tables must not go stale. Each
finished run is a CSV file in --output-dir, with the settings that made it, and is not made again
while these stay the same.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from defaults_page import FLOAT32, METHODS, TABLE_METHODS, headings, page, rows, window_rows
from defaults_runs import TASKS, Run
from missing_runs import with_results

from hvd_adaptive.tools.methods import parse
from hvd_adaptive.tools.output import print_table, script_parser, whole

TABLE_TASK = "lenet"


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = script_parser(__doc__)
    add = parser.add_argument
    add("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK")
    add("--methods", nargs="+", default=METHODS, metavar="METHOD", help="of the texts' tasks")
    add("--paired-seeds", type=whole(2), default=10, metavar="N", help="of the texts' tasks (10)")
    add("--steps", type=whole(1), help="of a run (the task's own)")
    add("--output-dir", type=Path, default=Path("runs/defaults"))
    add("--jobs", type=whole(1), default=1, help="processes, one thread each (1)")
    add("--page", type=Path, metavar="FILE", help="write the tables to a page in Markdown")
    args = parser.parse_args(words)
    try:
        parse(args.methods)
    except ValueError as error:
        parser.error(f"--methods: {error}")
    return args


def runs_of(args: argparse.Namespace, task: str) -> list[Run]:
    """Return the runs of a task, float32 first."""
    steps = args.steps or TASKS[task].steps
    if task == TABLE_TASK:
        return [Run(task, method, 0, steps) for method in TABLE_METHODS]
    methods = dict.fromkeys([FLOAT32, *args.methods])
    return [Run(task, m, seed, steps) for m in methods for seed in range(args.paired_seeds)]


def main(words: Sequence[str] | None = None) -> int:
    """Make the runs that are missing; print and write tables."""
    args = arguments(words)
    jobs = {task: runs_of(args, task) for task in args.tasks}
    found = with_results(jobs, args.output_dir, args.jobs)
    tables = {}
    for task, results in found.items():
        tables[task] = window_rows(results) if task == TABLE_TASK else rows(results)
        print_table(headings(results), tables[task], title=TASKS[task].title)
    if args.page:
        given = sys.argv[1:] if words is None else words
        command = shlex.join(["python", "research/defaults.py", *given])
        args.page.write_text(page(command, found, tables), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
