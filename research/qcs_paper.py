"""The QCS paper's Figs 2, 3, 4 and 6 to 8 (Abdi and Fekri, AAAI 2020) on our codecs and data.

python research/qcs_paper.py --output-dir runs/qcs --figures docs/images --page docs/qcs.md

Each finished run is a CSV file in --output-dir, with the settings that made it, and is not made
again while these stay the same.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from missing_runs import with_results
from qcs_gain import REGRESSION
from qcs_regression import Regression
from qcs_training import METHODS, Training
from qcs_variance import GAINS, INTERVALS, Scale, Trajectory

from hvd_adaptive.tools.output import script_parser, whole


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = script_parser(__doc__)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/qcs"))
    parser.add_argument("--figures", type=Path, default=Path("docs/images"), metavar="DIR")
    parser.add_argument("--page", type=Path, default=Path("docs/qcs.md"), help="in Markdown")
    parser.add_argument("--jobs", type=whole(1), default=1, help="processes, one thread each (1)")
    parser.add_argument("--seeds", type=whole(1), default=20, help="of each training run (20)")
    parser.add_argument("--steps", type=whole(1), default=40, help="of a training run (40)")
    parser.add_argument("--workers", type=whole(1), nargs="+", default=[1, 4, 16])
    parser.add_argument(
        "--repeats",
        type=whole(1),
        default=40,
        help="regressions of each method and step size (40)",
    )
    parser.add_argument("--regression-steps", type=whole(1), default=300)
    parser.add_argument("--gains", type=whole(1), nargs="+", default=GAINS, help="of Fig. 3's QCS")
    parser.add_argument(
        "--intervals", type=whole(1), nargs="+", default=INTERVALS, help="of Fig. 3's QSGD"
    )
    return parser


def jobs_of(args: argparse.Namespace) -> dict[str, list[Any]]:
    """All runs, by what is drawn from them."""
    # Adam, as in Fig. 8, and the convergence of Fig. 7 are shown for four workers.
    wanted = [(model, "SGD", w) for model in ("fc", "lenet") for w in sorted({*args.workers, 4})]
    return {
        "regression": [Regression(m, args.repeats, args.regression_steps) for m in REGRESSION],
        "variance": [
            Scale(seed, min(20, args.steps), tuple(args.gains), tuple(args.intervals))
            for seed in range(args.seeds)
        ],
        "trajectories": [Trajectory(seed, args.steps) for seed in range(args.seeds)],
        "training": [
            Training(model, optimizer, method, workers, seed, args.steps)
            for seed in range(args.seeds)
            for model, optimizer, workers in [*wanted, ("lenet", "Adam", 4)]
            for method in METHODS
        ],
    }


def main() -> None:
    """Make what is missing, then draw and write."""
    args = make_parser().parse_args()
    made = with_results(jobs_of(args), args.output_dir, args.jobs)

    from qcs_figures import draw
    from qcs_page import write_page

    draw(made, args.figures)
    write_page(made, args.page, os.path.relpath(args.figures, args.page.parent))


if __name__ == "__main__":
    main()
