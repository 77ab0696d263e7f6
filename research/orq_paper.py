"""The ORQ paper's Figs 1 to 3 and Tables 2 to 5 ("Optimal Gradient Quantization Condition for
Communication-Efficient Distributed Training", 2020) on our codecs and data.

python research/orq_paper.py --output-dir runs/orq --figures docs/images --page docs/orq.md

Each finished run is a CSV file in --output-dir, with the settings that made it, and is not made
again while these stay the same.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from compare_runs import TASKS
from missing_runs import with_results
from orq_gradients import Errors, Histograms, Solvers
from orq_methods import (
    BUCKET,
    BUCKETS,
    CLIP_BUCKET,
    CLIPPED,
    CLIPS,
    DISTRIBUTED,
    FULL,
    METHODS,
    SIZED,
    WORKERS,
    WORKERS_CLIP,
)
from orq_training import TASK, Training

from hvd_adaptive.tools.output import script_parser, whole


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = script_parser(__doc__)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/orq"))
    parser.add_argument("--figures", type=Path, default=Path("docs/images"), metavar="DIR")
    parser.add_argument("--page", type=Path, default=Path("docs/orq.md"), help="in Markdown")
    parser.add_argument("--jobs", type=whole(1), default=1, help="processes, one thread each (1)")
    parser.add_argument(
        "--seeds", type=whole(1), default=20, help="of each run and measurement (20)"
    )
    parser.add_argument(
        "--steps",
        type=whole(1),
        default=TASKS[TASK].steps,
        help=f"of a training run ({TASKS[TASK].steps})",
    )
    parser.add_argument(
        "--buckets",
        type=whole(1),
        nargs="+",
        default=BUCKETS,
        metavar="SIZE",
        help=f"of Table 3 ({' '.join(map(str, BUCKETS))})",
    )
    parser.add_argument("--validation", type=whole(1), default=2000, help="images (2000)")
    parser.add_argument(
        "--solver-seeds",
        type=whole(1),
        default=3,
        help="trainings on which ORQ's solvers are compared (3)",
    )
    return parser


def jobs_of(args: argparse.Namespace) -> dict[str, list[Any]]:
    """All runs, by what is made of them; seed by seed, so that what there is stays balanced."""
    settings = [(FULL, 0, None), *((method, BUCKET, None) for method in METHODS)]
    settings += [(method, size, None) for size in args.buckets for method in SIZED]
    settings += [(m, CLIP_BUCKET, clip) for clip in CLIPS for m in CLIPPED]
    together = [(FULL, 0, None), *((m, CLIP_BUCKET, WORKERS_CLIP) for m in DISTRIBUTED)]
    seeds, shared = range(args.seeds), (args.steps, args.validation)
    return {
        "histograms": [Histograms(seed, args.steps) for seed in seeds],
        "errors": [Errors(seed, args.steps) for seed in seeds],
        "solvers": [Solvers(seed, args.steps) for seed in range(args.solver_seeds)],
        "training": [
            Training(*setting, seed, *shared)
            for seed in seeds
            for setting in dict.fromkeys(settings)
        ],
        "distributed": [
            Training(*setting, seed, *shared, WORKERS) for seed in seeds for setting in together
        ],
    }


def main() -> None:
    """Make what is missing, then draw and write."""
    args = make_parser().parse_args()
    made = with_results(jobs_of(args), args.output_dir, args.jobs)

    from orq_figures import draw
    from orq_page import write_page

    draw(made, args.figures)
    write_page(made, args.page, os.path.relpath(args.figures, args.page.parent))


if __name__ == "__main__":
    main()
