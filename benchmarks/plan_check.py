"""What `hvd-adaptive plan` predicts beside what the laboratory measures (benchmarks/network.py).

    python benchmarks/plan_check.py [--hosts 2 4 8] [--rates 100mbit 1gbit 10gbit]

Needs root and iproute2. Constants are measured first, on the same machine; of the laboratory four
figures enter the predictions, plan.quantities.EFFICIENCY and PAIR. All hosts share this machine's
cores, so each has cores/hosts of them. --launcher gloo takes Horovod's collectives on Gloo,
--constants FOLDER keeps what was measured, --json FILE predictions and measurements.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from laboratory import methods as asked
from laboratory.hosts import Hosts, LaboratoryError, bits_per_second
from laboratory.launch import check_programs
from laboratory.measure import Settings, measure
from laboratory.shapes import SIZES
from rich.console import Console
from rich.table import Table

from hvd_adaptive.bench.ranks import LAUNCHERS, RanksError, hints
from hvd_adaptive.plan import measure as measuring
from hvd_adaptive.plan.model import predict
from hvd_adaptive.plan.quantities import Cluster, Conditions, Job, Machine, Prediction

# The schemes that are predicted, and how the laboratory calls them.
SCHEMES = {"ALQ(bits=3)": "alq:bits=3", "ECDQ(bits=2)": "ecdq:bits=2",
           "QSGD(bits=8, norm='linf')": "qsgd:bits=8,norm=linf"}  # fmt: skip
EXCHANGES = ("allgather", "scatter_reduce")
LATENCY = 100e-6  # of a message between two of the laboratory's hosts
TARGET = 0.25


def main() -> int:
    """Measure, predict, compare; 1 where a prediction misses the target, 2 without a laboratory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit", "10gbit"])
    parser.add_argument("--model", choices=SIZES, default="resnet18")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--launcher", choices=LAUNCHERS, default="mpi")
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--constants", type=Path, help="keep what was measured in this folder")
    parser.add_argument("--json", type=Path, help="write predictions and measurements")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *told: sys.exit(3))  # which removes the hosts
    try:
        check_programs({args.launcher})
        for hosts in args.hosts:
            tell(f"constants for {hosts} ranks")
            machine = constants(args, hosts)
            for rate in args.rates:
                tell(f"{hosts} hosts at {rate}")
                rows += compare(args, machine, hosts, rate)
    except (LaboratoryError, RanksError, ValueError) as error:
        told = hints(error.output) if isinstance(error, RanksError) else []
        print("\n".join([f"plan_check.py: {error}", *told]), file=sys.stderr)
        return 2
    finally:  # what there is, if it was cut short
        show(rows)
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return 0 if all(abs(row["predicted"] / row["measured"] - 1) <= TARGET for row in rows) else 1


def tell(what: str) -> None:
    """What is going on, to who waits."""
    print(f"plan_check.py: {time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


def constants(args: argparse.Namespace, hosts: int) -> Machine:
    """For so many ranks, measured here or before."""
    tensors = SIZES[args.model][0]
    crowd = cluster_of(hosts, args.rates[0]).crowd
    conditions = Conditions(hosts, hosts, *SIZES[args.model], crowd, args.launcher)
    path = args.constants and args.constants / f"plan-{args.launcher}-{hosts}-{tensors}.json"
    if path and path.exists():
        return measuring.load(path, conditions)
    machine = measuring.measure(args.schemes, conditions, tell)
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        measuring.save(machine, conditions, path)
    return machine


def cluster_of(hosts: int, rate: str) -> Cluster:
    """The laboratory's, whose hosts share this machine's cores."""
    return Cluster(
        ranks=hosts,
        bandwidth=bits_per_second(rate) / 8,
        latency=LATENCY,
        cores=len(os.sched_getaffinity(0)) / hosts,
    )


def predictions(
    args: argparse.Namespace, machine: Machine, hosts: int, rate: str
) -> dict[str, Prediction]:
    """By the laboratory's labels."""
    cluster = cluster_of(hosts, rate)
    known = tuple(codec for codec in machine.codecs if codec.label in args.schemes)
    found = predict(cluster, Job(*SIZES[args.model]), replace(machine, codecs=known))
    names = {"float32": "none", "float16": "fp16"}
    labels = (names.get(p.method) or f"{SCHEMES[p.method]},exchange={p.exchange}" for p in found)
    return {f"{args.launcher}/{label}": p for label, p in zip(labels, found, strict=True)}


def compare(
    args: argparse.Namespace, machine: Machine, hosts: int, rate: str
) -> list[dict[str, Any]]:
    """Both, of every method."""
    expected = predictions(args, machine, hosts, rate)
    settings = Settings(args.model, args.steps, args.rounds)
    with Hosts(hosts, rate) as laboratory:
        results = measure(laboratory, asked.parse(list(expected)), settings)
    rows = []
    for result in results:
        if not result.seconds:
            print(f"{result.method.label}: {result.trouble}", file=sys.stderr)
            continue
        own = expected[result.method.label]
        rows.append({
            "hosts": hosts, "rate": rate, "method": result.method.label,
            "predicted": own.step_s, "measured": result.median, "wire_s": own.wire_s,
            "processor_s": own.processor_s, "sent": result.mean("sent_bytes"),
            "predicted_sent": own.wire_bytes,
        })  # fmt: skip
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """As a table, and how many are within the target."""
    table = Table(caption="ms of a step; wire and processor: the prediction's parts")
    for column in ("hosts", "rate", "method"):
        table.add_column(column)
    for column in ("predicted", "measured", "ratio", "wire", "processor", "sent / predicted"):
        table.add_column(column, justify="right")
    for row in rows:
        ratio = row["predicted"] / row["measured"]
        table.add_row(
            str(row["hosts"]),
            row["rate"],
            row["method"],
            *(f"{1e3 * row[name]:.1f}" for name in ("predicted", "measured")),
            f"{ratio:.2f}",
            *(f"{1e3 * row[name]:.1f}" for name in ("wire_s", "processor_s")),
            f"{row['sent'] / row['predicted_sent']:.2f}",
            style=None if abs(ratio - 1) <= TARGET else "red",
        )
    console = Console()
    (console if console.is_terminal else Console(width=130)).print(table)
    good = sum(abs(row["predicted"] / row["measured"] - 1) <= TARGET for row in rows)
    console.print(f"{good} of {len(rows)} within {TARGET:.0%}")


if __name__ == "__main__":
    sys.exit(main())
