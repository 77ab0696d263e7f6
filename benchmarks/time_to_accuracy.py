"""Seconds of training until a network is as good as float32 makes it, on hosts of the laboratory.

    python benchmarks/time_to_accuracy.py --output-dir runs/time_to_accuracy [--task mnist] ...

Every method trains the same network from the same seeds, with the same batches and learning rate,
on hosts whose links are shaped (network.py). Tests are not timed. Each launch's curves are kept in
the output folder as they end, so that a series that was cut off goes on. A seed's target is the
quality of the first method after --steps steps from the same seed; all methods train some more.
Needs Linux, root and iproute2.

What a step learns does not depend on the network. --qualities-at 10gbit takes the quality after
each step from runs at that rate, which may run beside other load, and only times steps at --rate.
Folder curves has such runs of --task characters; --output-dir benchmarks/curves uses them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from laboratory import curves
from laboratory import methods as asked
from laboratory.files import read_json, write_json
from laboratory.hosts import FOLDER, Hosts, LaboratoryError
from laboratory.launch import check_programs, launch
from laboratory.methods import Method
from laboratory.tasks import TASKS, tuned
from tqdm import tqdm

from hvd_adaptive.tools.output import print_table, script_parser, whole

METHODS = (
    "ddp/float32",
    "ddp/float16",
    "ddp/PowerSGD(rank=1|4)",
    "mpi/float32",
    "mpi/float16",
    "ALQ(bits=3)",
    "ALQ(bits=3, exchange=ScatterReduce(second_stage_bits=4))",
    "ECDQ(bits=2)",
    "EDEN(bits=1|2)",
)
SECONDS = 1500.0  # of a launch
LAUNCHES = 3  # until one has ended well

# {method: {seed: curve}}
Kept = dict[str, dict[int, Any]]


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = script_parser(__doc__)
    parser.add_argument("--task", choices=TASKS, default="mnist")
    parser.add_argument("--hosts", type=whole(2), default=4)
    parser.add_argument("--rate", default="100mbit", help="of each link, as tc writes it: 100mbit")
    parser.add_argument("--methods", nargs="+", default=METHODS, metavar="METHOD")
    parser.add_argument("--seeds", type=whole(1), default=5, help="runs of each method (5)")
    parser.add_argument("--steps", type=whole(1), help="of the target; the task's own if not given")
    parser.add_argument(
        "--extra", type=float, default=1.25, help="factor of the steps that are trained (1.25)"
    )
    parser.add_argument(
        "--target", choices=("seed", "mean"), default="seed", help="of each seed, or their mean"
    )
    parser.add_argument("--every", type=whole(1), default=10, help="steps between tests (10)")
    parser.add_argument(
        "--qualities-at", metavar="RATE", help="take qualities from runs at this rate, time steps"
    )
    parser.add_argument(
        "--timed", type=whole(1), default=20, help="steps that --qualities-at times (20)"
    )
    parser.add_argument(
        "--timed-seeds", type=whole(1), default=2, help="runs that --qualities-at times (2)"
    )
    parser.add_argument("--output-dir", type=Path, default=Path("runs/time_to_accuracy"))
    parser.add_argument(
        "--tune", action="store_true", help="try learning rates of float32, and end"
    )
    return parser.parse_args()


def main() -> int:
    """Train, print the table and draw the curves; 2 if the hosts cannot be built."""
    args = arguments()
    task = TASKS[args.task]
    steps = args.steps or task.steps
    if args.tune:
        tune(args, steps)
        return 0
    methods = asked.parse(args.methods)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    name = _name(args, args.rate, steps)
    try:
        check_programs({method.backend for method in methods})
        kept, trouble = trained(args, methods, steps)
    except (LaboratoryError, ValueError) as error:
        print(f"time_to_accuracy.py: {error}", file=sys.stderr)
        return 2
    for label, why in trouble.items():
        print(f"{label}: {why}", file=sys.stderr)
    labels = [method.label for method in methods if method.label in kept]
    own = {label: {s: c for s, c in kept[label].items() if s < args.seeds} for label in labels}
    own = {label: found for label, found in own.items() if found}
    if methods[0].label not in own:
        print(f"time_to_accuracy.py: {methods[0].label} has no runs", file=sys.stderr)
        return 1
    show(own, methods[0].label, args, steps)
    title = f"{args.task}, {args.hosts} hosts at {args.rate}, mean of {args.seeds} seeds"
    curves.draw(own, task.quality, title, str(args.output_dir / f"{name}.png"))
    return 0


def trained(
    args: argparse.Namespace, methods: list[Method], steps: int
) -> tuple[Kept, dict[str, str]]:
    """Return the curves of all runs, from files or made now, and why some are missing."""
    folder, more = args.output_dir, round(args.extra * steps)
    if args.qualities_at is None:
        return made(
            args, methods, more, args.seeds, folder / f"{_name(args, args.rate, steps)}.json"
        )
    known = read(folder / f"{_name(args, args.qualities_at, steps)}.json")
    path = folder / f"{_name(args, args.rate, args.timed)}.json"
    timed, trouble = made(args, methods, args.timed, args.timed_seeds, path)
    both = [label for label in timed if label in known]
    trouble |= {label: f"no runs at {args.qualities_at}" for label in timed if label not in known}
    return {label: curves.at_speed(known[label], timed[label]) for label in both}, trouble


def _name(args: argparse.Namespace, rate: str, steps: int) -> str:
    return f"{args.task}-{args.hosts}x{rate}-{steps}steps"


def read(path: Path) -> Kept:
    """Return the curves of a file, none if there is no such file."""
    found = read_json(path).items()
    return {label: {int(seed): curve for seed, curve in own.items()} for label, own in found}


def made(
    args: argparse.Namespace, methods: list[Method], steps: int, seeds: int, path: Path
) -> tuple[Kept, dict[str, str]]:
    """Return the curves of runs of ``steps`` steps, from the file or made now."""
    kept = read(path)
    trouble = asked.refusals(methods)
    backends = list(dict.fromkeys(method.backend for method in methods))
    launches = [(seed, backend) for seed in range(seeds) for backend in backends]
    with tqdm(launches, unit="launch", disable=not sys.stderr.isatty()) as bar:
        for seed, backend in bar:
            bar.set_description(f"seed {seed}, {backend}")
            missing = {
                method.label: steps
                for method in methods
                if method.backend == backend
                and method.label not in trouble
                and seed not in kept.get(method.label, {})
            }
            if not missing:
                continue
            plan = {"backend": backend, "task": args.task, "seed": seed, "methods": missing}
            plan |= {"every": args.every, "ranks_per_host": 1}
            for label, found in launched(args, plan).items():
                if isinstance(found, str):
                    trouble[label] = found
                else:
                    kept.setdefault(label, {})[seed] = found
            write_json(path, kept)
    return kept, trouble


def launched(args: argparse.Namespace, plan: dict[str, Any]) -> dict[str, Any]:
    """Return each method's curve, or why there is none."""
    found: dict[str, Any] = {}
    for _ in range(LAUNCHES):
        missing = {label: n for label, n in plan["methods"].items() if label not in found}
        if not missing:
            break
        with Hosts(args.hosts, args.rate) as hosts:
            this = plan | {"methods": missing, "folder": str(FOLDER)}
            ended = launch(hosts, this, SECONDS, "laboratory.trainer")
        for label in missing:
            rows = [rank["methods"].get(label) for rank in ended["ranks"]]
            if len(rows) == args.hosts and None not in rows:
                same = len({row["crc"] for row in rows}) == 1
                found[label] = rows[0]["curve"] if same else "ranks end with other parameters"
        error = next((r["failed"] for r in ended["ranks"] if r.get("failed")), ended.get("error"))
    return {label: found.get(label, f"failed: {error}") for label in plan["methods"]}


def show(kept: Kept, baseline: str, args: argparse.Namespace, steps: int) -> None:
    """Print how fast each method reaches the baseline's quality."""
    task = TASKS[args.task]
    paired, rows = args.target == "seed", []
    found = curves.summary(kept, baseline, steps, task.larger_is_better, paired)
    for label, own in found.items():
        ratio = "-"
        if own.ratio is not None:
            mean, low, high = own.ratio
            ratio = f"{mean:.2f} ({low:.2f} to {high:.2f})"
        seconds = "never" if own.seconds is None else f"{own.seconds:.1f}"
        reached = f"{own.reached} of {own.seeds}"
        apart = "-" if own.apart is None else f"{own.apart[0]:+.4f} ± {own.apart[1]:.4f}"
        cells = f"{1e3 * own.step:.0f}", f"{own.final:.4f}", apart, reached, seconds, ratio
        rows.append((label, *cells))
    headings = ["method", "ms\na step", f"final\n{task.quality}"]
    headings += [f"after {steps} steps minus\n{baseline} (95 %)", "seeds that\nreach it"]
    headings += ["seconds", "times as fast\n(95 %)"]
    title = f"{args.task}: {steps} steps on {args.hosts} hosts at {args.rate}"
    whose = "each seed's" if paired else "mean"
    caption = f"target: {whose} {task.quality} of {baseline} after {steps} steps; rate {task.rate}"
    print_table(headings, rows, title=title, caption=caption)


def tune(args: argparse.Namespace, steps: int) -> None:
    """Print the quality of float32 at the end for each learning rate."""
    task, rows = TASKS[args.task], []
    for rate in task.rates:
        found = [tuned(task, rate, seed, steps, args.hosts) for seed in range(args.seeds)]
        rows.append((f"{rate:g}", f"{statistics.fmean(found):.4f}"))
    print_table(("rate", task.quality), rows, texts=0)


if __name__ == "__main__":
    sys.exit(main())
