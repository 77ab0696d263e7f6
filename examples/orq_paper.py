"""The ORQ paper's Figs 1 and 2 and Tables 2 to 4 ("Optimal Gradient Quantization Condition for
Communication-Efficient Distributed Training", 2020) on our codecs and data.

python examples/orq_paper.py --output-dir runs/orq --figures docs/images --page docs/orq.md

Each finished run is a CSV file in --output-dir, with the settings that made it, and is not made
again while these stay the same.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from compare import execute
from compare_runs import TASKS
from orq_gradients import Errors, Histograms, Solvers
from orq_methods import BUCKET, BUCKETS, CLIP_BUCKET, CLIPPED, CLIPS, FULL, METHODS
from orq_training import TASK, Training


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-dir", type=Path, default=Path("runs/orq"))
    parser.add_argument("--figures", type=Path, default=Path("docs/images"), metavar="DIR")
    parser.add_argument("--page", type=Path, default=Path("docs/orq.md"), help="in Markdown")
    parser.add_argument("--jobs", type=_positive, default=1, help="processes, one thread each (1)")
    parser.add_argument("--seeds", type=_positive, default=5, help="of each training run (5)")
    parser.add_argument("--steps", type=_positive, default=TASKS[TASK].steps,
                        help=f"of a training run ({TASKS[TASK].steps})")  # fmt: skip
    parser.add_argument("--buckets", type=_positive, nargs="+", default=BUCKETS, metavar="SIZE",
                        help=f"of Table 3 ({' '.join(map(str, BUCKETS))})")  # fmt: skip
    parser.add_argument("--validation", type=_positive, default=2000, help="images (2000)")
    parser.add_argument("--trajectories", type=_positive, default=3,
                        help="whose gradients all methods are measured on (3)")  # fmt: skip
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be an integer >= 1")
    return int(text)


def jobs_of(args: argparse.Namespace) -> dict[str, list[Any]]:
    """All runs, by what is made of them; seed by seed, so that what there is stays balanced."""
    buckets = sorted({*args.buckets, BUCKET, CLIP_BUCKET})
    settings = [(method, size, None) for size in buckets for method in METHODS]
    settings += [(m, CLIP_BUCKET, clip) for clip in CLIPS if clip is not None for m in CLIPPED]
    seeds = range(args.trajectories)
    return {
        "histograms": [Histograms(0, args.steps)],
        "errors": [Errors(seed, args.steps) for seed in seeds],
        "solvers": [Solvers(seed, args.steps) for seed in seeds],
        "training": [
            Training(*setting, seed, args.steps, args.validation)
            for seed in range(args.seeds)
            for setting in [(FULL, 0, None), *settings]
        ],
    }


def main() -> int | str:
    """Make what is missing, then draw and write; returns what sys.exit takes."""
    args = make_parser().parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    jobs = jobs_of(args)
    missing = [job for kind in jobs.values() for job in kind if job.load(args.output_dir) is None]
    failed = execute(missing, args.output_dir, args.jobs)
    if failed:
        return "\n".join(failed)
    made = {kind: [(job, job.load(args.output_dir)) for job in of] for kind, of in jobs.items()}

    from orq_figures import draw
    from orq_page import write_page

    draw(made, args.figures)
    write_page(made, args.page, os.path.relpath(args.figures, args.page.parent))
    return 0


if __name__ == "__main__":
    sys.exit(main())
