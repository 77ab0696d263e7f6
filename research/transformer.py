"""A character transformer trained by FSDP2 and by DDP: gradients in codes against float32.

    python research/transformer.py                                # a table
    python research/transformer.py --page docs/transformer.md     # ... and the page

Two ranks of this machine exchange by gloo. Each finished run is a file in --output-dir, with
the settings that made it, and is not made again while these stay the same.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch.multiprocessing
from transformer_page import headings, page, rows
from transformer_runs import METHODS, RANKS, Run, work

from hvd_adaptive.tools.output import print_table, script_parser, whole


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = script_parser(__doc__)
    add = parser.add_argument
    add("--paired-seeds", type=whole(2), default=8, metavar="N", help="runs of each method (8)")
    add("--steps", type=whole(1), default=300, help="of a run (300)")
    add("--output-dir", type=Path, default=Path("runs/transformer"))
    add("--page", type=Path, metavar="FILE", help="write the table to a page in Markdown")
    return parser.parse_args(words)


def make(missing: Sequence[Run], folder: Path) -> None:
    """Make runs one after the other, on ranks of their own."""
    with tempfile.TemporaryDirectory() as store:
        torch.multiprocessing.start_processes(
            work, (list(missing), folder, store), nprocs=RANKS, start_method="spawn"
        )


def main(words: Sequence[str] | None = None) -> int:
    """Make the runs that are missing; print and write the table."""
    args = arguments(words)
    runs = [Run(m, seed, args.steps) for seed in range(args.paired_seeds) for m in METHODS]
    if missing := [run for run in runs if run.load(args.output_dir) is None]:
        make(missing, args.output_dir)
    found = {run: run.load(args.output_dir) or {} for run in runs}
    print_table(headings(), rows(found), title="Character transformer")
    if args.page:
        given = sys.argv[1:] if words is None else words
        command = shlex.join(["python", "research/transformer.py", *given])
        args.page.write_text(page(command, found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
