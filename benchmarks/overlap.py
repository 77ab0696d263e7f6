"""Measures how much of its exchange a training step hides behind the backward pass.

    python benchmarks/overlap.py --hosts 2 4 --models resnet18 llama vgg bert

Each method exchanges a network's gradients twice: in a backward pass that takes no time, and in one
that takes --backward-ms, the processor idle, as where a GPU computes. "nothing" shows what the
framework itself adds to the backward pass. Needs Linux, root and iproute2, as network.py does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from laboratory import methods as asked
from laboratory.hosts import Hosts, LaboratoryError
from laboratory.launch import check_programs
from laboratory.measure import Result, Settings, measure
from laboratory.methods import NOTHING
from laboratory.shapes import SIZES
from tqdm import tqdm

from hvd_adaptive.tools.output import print_table, script_parser, whole

METHODS = (
    "ddp/nothing",
    "ddp/float32",
    "ddp/float16",
    "ddp/PowerSGD(rank=1|4)",
    "ddp/ALQ(bits=3)",
    "ddp/EDEN(bits=1)",
    "mpi/nothing",
    "mpi/float32",
    "mpi/float16",
    "ALQ(bits=3)",
    "ALQ(bits=3, tuning=Tuning(worker=False))",
    "ALQ(bits=3, exchange=ScatterReduce(second_stage_bits=4))",
)
COLUMNS = ("method", "backward", "exchange", "both", "both / larger", "hidden")


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = script_parser(__doc__)
    parser.add_argument("--hosts", type=whole(2), nargs="+", default=[2, 4])
    parser.add_argument("--models", choices=SIZES, nargs="+", default=["resnet18"])
    parser.add_argument("--rate", default="1gbit", help="of each link, as tc writes it: 1gbit")
    parser.add_argument("--methods", nargs="+", default=METHODS, metavar="METHOD")
    parser.add_argument("--backward-ms", type=whole(1), default=120, metavar="MS")
    parser.add_argument("--steps", type=whole(1), default=8, help="timed, in each round")
    parser.add_argument("--rounds", type=whole(1), default=2, help="each runs every method")
    parser.add_argument("--json", metavar="FILE", help="write the figures")
    return parser.parse_args()


def figures(alone: Result, both: Result) -> dict[str, float]:
    """Return seconds of a step's parts, and the hidden share of what can be hidden.

    Args:
        alone: The exchange in a backward pass that takes no time.
        both: The exchange in a backward pass that takes time.
    """
    backward, exchange = statistics.median(both.backward_s), alone.median
    return {
        "backward": backward,
        "exchange": exchange,
        "both": both.median,
        "both / larger": both.median / max(backward, exchange),
        "hidden": (backward + exchange - both.median) / min(backward, exchange),
    }


def measured(model: str, count: int, args: argparse.Namespace, bar: tqdm) -> dict[str, Any]:
    """Return the figures of each method by label, on ``hosts`` hosts."""
    methods = asked.parse(args.methods)
    pairs = []
    with Hosts(count, args.rate) as hosts:
        for backward_s in (0.0, args.backward_ms / 1e3):
            settings = Settings(model, args.steps, args.rounds, backward_s=backward_s)
            pairs.append(measure(hosts, methods, settings, bar.set_description, bar.update))
    found: dict[str, Any] = {}
    for alone, both in zip(*pairs, strict=True):
        trouble = alone.trouble or both.trouble
        found[alone.method.label] = trouble or figures(alone, both)
    return found


def show(model: str, count: int, args: argparse.Namespace, found: dict) -> None:
    """Print the figures of one model on ``hosts`` hosts."""
    rows: list[tuple[str, ...]] = []
    for label, row in found.items():
        if isinstance(row, str):
            rows.append((label, row))
            continue
        seconds = [f"{row[name]:.3f}" for name in COLUMNS[1:4]]
        hidden = "" if label.endswith(NOTHING) else f"{row['hidden']:.0%}"
        rows.append((label, *seconds, f"{row['both / larger']:.2f}", hidden))
    print_table(COLUMNS, rows, title=f"{model}, {count} hosts at {args.rate}, seconds")


def main() -> int:
    """Measure and print; 2 if the hosts cannot be built."""
    args = arguments()
    backends = {method.backend for method in asked.parse(args.methods)}
    launches = 2 * args.rounds * len(backends) * len(args.models) * len(args.hosts)
    rows = []
    try:
        check_programs(backends)
        with tqdm(total=launches, unit="launch", disable=not sys.stderr.isatty()) as bar:
            for model in args.models:
                for count in args.hosts:
                    found = measured(model, count, args, bar)
                    show(model, count, args, found)
                    rows.append({"model": model, "hosts": count, "methods": found})
    except (LaboratoryError, ValueError) as error:
        print(f"overlap.py: {error}", file=sys.stderr)
        return 2
    if args.json:
        written = {"arguments": vars(args), "rows": rows}
        Path(args.json).write_text(json.dumps(written, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
