"""What `hvd-adaptive plan` predicts beside what the laboratory measures (benchmarks/network.py).

    python benchmarks/plan_check.py [--hosts 2 4 8] [--rates 100mbit 1gbit 10gbit] [--keep FOLDER]

Needs root and iproute2. Constants are measured first, on the same machine. All hosts share this
machine's cores, so each has cores/hosts of them. Exit status: 0 if all predictions are within a
factor of 1.5, 1 if not, or if a method could not be measured, 2 without a laboratory.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from laboratory.hosts import LaboratoryError, bits_per_second
from laboratory.kept import measured
from laboratory.launch import check_programs
from laboratory.measure import Settings
from laboratory.shapes import SIZES

from hvd_adaptive.tools.launch import LAUNCHERS, RanksError, hints
from hvd_adaptive.tools.methods import read
from hvd_adaptive.tools.output import console, print_table, script_parser, whole
from hvd_adaptive.tools.plan import worker
from hvd_adaptive.tools.plan.model import Forecast, Job, Machine, predict

SCHEMES = ("ALQ(bits=3)", "ECDQ(bits=2)", "QSGD(bits=8, norm='linf')")  # that are predicted
LATENCY = 100e-6  # of a message between two of the laboratory's hosts
TARGET = 1.5


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = script_parser(__doc__)
    add = parser.add_argument
    add("--hosts", type=whole(2), nargs="+", default=[2, 4, 8])
    add("--ranks-per-host", type=whole(1), default=1)
    add("--rates", nargs="+", default=["100mbit", "1gbit", "10gbit"], help="as tc writes them")
    add("--model", choices=SIZES, default="resnet18")
    add("--steps", type=whole(1), default=5, help="timed, in each round")
    add("--rounds", type=whole(1), default=3, help="each runs every method")
    add("--launcher", choices=LAUNCHERS, default="mpi", help="whose collectives Horovod takes")
    add("--schemes", nargs="+", choices=SCHEMES, default=SCHEMES)
    add("--keep", type=Path, metavar="FOLDER", help="keep there what was measured, and go on")
    add("--json", type=Path, metavar="FILE", help="write predictions and measurements")
    return parser.parse_args()


def main() -> int:
    """Measure, predict, compare."""
    args = arguments()
    rows: list[dict[str, Any]] = []
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *told: sys.exit(3))  # which removes the hosts
    try:
        check_programs({args.launcher})
        if args.keep:
            args.keep.mkdir(parents=True, exist_ok=True)
        for hosts in args.hosts:
            machine = constants(args, hosts)
            for rate in args.rates:
                rows += compare(args, machine, hosts, rate)
    except (LaboratoryError, RanksError, ValueError) as error:
        told = hints(error.output) if isinstance(error, RanksError) else []
        print("\n".join([f"plan_check.py: {error}", *told]), file=sys.stderr)
        return 2
    finally:  # what there is, if it was cut short
        show(rows)
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return 0 if all(within(row) for row in rows) else 1


def tell(what: str) -> None:
    """What is going on, to who waits."""
    print(f"plan_check.py: {time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


def constants(args: argparse.Namespace, hosts: int) -> Machine:
    """Return the constants for a number of hosts."""
    tell(f"constants for {hosts} hosts of {args.ranks_per_host} ranks")
    return worker.constants(args.schemes, hosts * args.ranks_per_host, args.launcher)


def predictions(
    args: argparse.Namespace, machine: Machine, hosts: int, rate: str
) -> dict[str, Forecast]:
    """By the laboratory's labels. Its hosts share this machine's cores."""
    job = Job(
        *SIZES[args.model],
        ranks=hosts * args.ranks_per_host,
        bandwidth=bits_per_second(rate) / 8,
        per_host=args.ranks_per_host,
        latency=LATENCY,
        cores=len(os.sched_getaffinity(0)) / hosts,
    )
    found = {}
    for one in predict(job, machine):
        (method,) = read(one.method)
        found[f"{args.launcher}/{method.having(exchange=one.exchange).label}"] = one
    return found


def compare(
    args: argparse.Namespace, machine: Machine, hosts: int, rate: str
) -> list[dict[str, Any]]:
    """Both, of every method; "measured" is None where it could not be."""
    tell(f"{hosts} hosts at {rate}")
    expected = predictions(args, machine, hosts, rate)
    settings = Settings(args.model, args.steps, args.rounds, ranks_per_host=args.ranks_per_host)
    name = f"laboratory-{hosts}-{rate}-{args.launcher}-{args.model}-{args.ranks_per_host}.json"
    path = args.keep / name if args.keep else None
    rows = []
    for label, found in measured(path, list(expected), hosts, rate, settings).items():
        if found["trouble"]:
            print(f"{label}: {found['trouble']}", file=sys.stderr)
        own, seconds = expected[label], found["seconds"]
        rows.append(
            {
                "hosts": hosts,
                "rate": rate,
                "method": label,
                "predicted": own.step_s,
                "measured": statistics.median(seconds) if seconds else None,
                "wire_s": own.wire_s,
                "processor_s": own.codec_s + own.calls_s,
                "sent": found["sent"],
                # None if a host's ranks also send to each other.
                "predicted_sent": own.sent if args.ranks_per_host == 1 else None,
            }
        )
    return rows


def within(row: dict[str, Any]) -> bool:
    """Whether a prediction is within the target."""
    seconds = row["measured"]
    return bool(seconds) and 1 / TARGET <= row["predicted"] / seconds <= TARGET


def show(rows: list[dict[str, Any]]) -> None:
    """As a table, and how many are within the target."""
    headings = ["hosts", "rate", "method", "predicted", "measured", "ratio", "wire"]
    headings += ["codec, calls", "sent / predicted"]
    lines = []
    for row in rows:
        seconds, told = row["measured"], row["predicted_sent"]
        line = (
            str(row["hosts"]),
            row["rate"],
            row["method"],
            f"{1e3 * row['predicted']:.1f}",
            f"{1e3 * seconds:.1f}" if seconds else "-",
            f"{row['predicted'] / seconds:.2f}" if seconds else "-",
            *(f"{1e3 * row[name]:.1f}" for name in ("wire_s", "processor_s")),
            f"{row['sent'] / told:.2f}" if row["sent"] and told else "-",
        )
        lines.append(line)
    styles = [None if within(row) else "red" for row in rows]
    caption = "ms of a step; wire, codec and calls: the prediction's parts"
    print_table(headings, lines, texts=3, styles=styles, caption=caption)
    console().print(f"{sum(map(within, rows))} of {len(rows)} within a factor of {TARGET}")


if __name__ == "__main__":
    sys.exit(main())
