"""The comparisons of mnist.py: it is started by horovodrun once for every method."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from compression import OPTIONS, STOCK, make_compression
from lenet import LeNet
from plots import draw
from rich.console import Console
from rich.table import Table
from scipy import stats

from hvd_adaptive.simulate import Ranks as SimulatedRanks
from hvd_adaptive.tools.launch import Ranks, RanksError, available
from hvd_adaptive.tools.output import make_table
from hvd_adaptive.tools.processes import Job

SCRIPT = Path(__file__).with_name("mnist.py")
FORWARDED = ("batch_size", "test_batch_size", "epochs", "lr", "momentum", "seed", "test_interval")
# What --demo asks of its results.
LEAST_ACCURACY = 0.8
LEAST_RATIO = 9.5


@dataclass
class Method:
    """A way to send gradients, and what came of it."""

    label: str
    compression: str
    options: list[str] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)


def compare(args: argparse.Namespace) -> int:
    """--demo and --paired-seeds; the exit status."""
    # Tables need more than the 80 columns that rich assumes where there is no terminal.
    console = Console() if sys.stdout.isatty() else Console(width=120)
    # A killed demo must not leave its ranks behind: this makes `finally` clauses run.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    begin = time.monotonic()
    status = 0
    try:
        compile_kernels(args, console)
        if args.demo:
            status |= demo(args, console)
        if args.paired_seeds:
            status |= paired_seeds(args, console)
    except (RanksError, TypeError, ValueError) as error:
        console.print(f"[bold red]failed:[/] {error}", highlight=False, soft_wrap=True)
        return 1
    console.print(f"{time.monotonic() - begin:.0f} seconds in all")
    return status


def compile_kernels(args: argparse.Namespace, console: Console) -> None:
    """Take one step in this process, so that the ranks' steps are not timed while they compile."""
    compression = make_compression(args, args.seed)
    if args.compression in STOCK:
        return
    begin, model = time.monotonic(), LeNet()
    simulated = SimulatedRanks(model.named_parameters(), compression, args.ranks)
    for rank in range(args.ranks):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        simulated.take(rank)
    if simulated.due(0):
        simulated.refit(0)
    simulated.average(0)
    console.print(f"kernels of {args.compression.upper()}: {time.monotonic() - begin:.0f} s")


def methods(args: argparse.Namespace) -> list[Method]:
    """Horovod's own methods and the one that --compression names."""
    options = []
    for name in OPTIONS:
        value = getattr(args, name)
        if value is not None:
            values = value if isinstance(value, list) else [value]
            options += [f"--{name.replace('_', '-')}", *map(str, values)]
    found = [Method("Horovod float32", "none"), Method("Horovod fp16", "fp16")]
    if args.compression not in STOCK:
        bits = f", {args.bits} bits" if args.bits else ""
        found.append(Method(args.compression.upper() + bits, args.compression, options))
    return found


def demo(args: argparse.Namespace, console: Console) -> int:
    """Train with every method, show what each sent and how good it is."""
    compared = methods(args)
    run_all(args, compared, console)
    for table in (traffic_table(compared, args.ranks), *level_tables(compared)):
        console.print(table)
    picture = args.output_dir / "mnist_demo.png"
    draw(compared, picture)
    console.print(f"accuracy against bytes sent, and the level table over time: {picture}")
    complaints = [complaint for method in compared for complaint in check(method)]
    for complaint in complaints:
        console.print(f"[bold red]failed:[/] {complaint}", highlight=False)
    return bool(complaints)


def check(method: Method) -> Iterator[str]:
    """What is wrong with a method's results."""
    run = method.runs[0]
    if not run["accuracy"] >= LEAST_ACCURACY:
        yield f"{method.label}: accuracy {run['accuracy']:.1%} is below {LEAST_ACCURACY:.0%}"
    if not run["replicas_equal"]:
        yield f"{method.label}: the ranks' parameters differ"
    ratio = run["uncompressed_bytes"] / run["payload_bytes"] if run["payload_bytes"] else 0
    promised = method.compression == "alq" and run["bits_per_coordinate"] < 4
    if promised and ratio < LEAST_RATIO:
        yield f"{method.label}: payload is 1/{ratio:.2f} of float32's, not 1/{LEAST_RATIO}"


def traffic_table(compared: list[Method], ranks: int) -> Table:
    """What each method sent, and what came of it."""
    headings = ["method", "test\naccuracy", "payload\nbytes", "float32 /\npayload"]
    headings += ["wire\nbytes", "float32 /\nwire", "ms per\nstep"]
    plain, rows = compared[0].runs[0], []
    for method in compared:
        run = method.runs[0]
        cells = (
            method.label,
            f"{run['accuracy']:.1%}",
            f"{run['payload_bytes']:,.0f}",
            ratio_text(plain["payload_bytes"], run["payload_bytes"]),
            f"{run['wire_bytes']:,.0f}",
            ratio_text(plain["wire_bytes"], run["wire_bytes"]),
            f"{1000 * run['seconds_per_step']:.1f}",
        )
        rows.append(cells)
    return make_table(
        headings,
        rows,
        title=f"LeNet, {plain['coordinates']:,} parameters, {ranks} ranks",
        caption="bytes are those of one rank's gradients in one step; wire: sent by that rank "
        "(ring allreduce, or allgather)",
    )


def ratio_text(whole: float, part: float) -> str:
    """How many times smaller."""
    return f"{whole / part:.2f}" if part else "-"


def level_tables(compared: list[Method]) -> Iterator[Table]:
    """Level tables before and after training, of methods that have one."""
    for method in compared:
        versions = method.runs[0]["tables"]
        if not versions:
            continue
        table = Table(title=f"{method.label}: levels (of a bucket's norm)")
        for heading in ("", "version", "fitted at step", "levels"):
            table.add_column(heading, no_wrap=True)
        for moment, version in zip(("before", "after"), (versions[0], versions[-1]), strict=True):
            fitted = "not fitted" if version["step"] is None else str(version["step"])
            table.add_row(moment, str(version["version"]), fitted, levels_text(version["levels"]))
        yield table


def levels_text(levels: list[float]) -> str:
    """``0, ±a, ±b ...``; at most eight magnitudes, the rest counted."""
    magnitudes = [f"±{level:.4g}" for level in levels if level > 0]
    zero = ["0"] if 0.0 in levels else []
    left_out = len(magnitudes) - 8
    if left_out > 0:
        magnitudes[4:-4] = [f"... {left_out} more ..."]
    return "  ".join(zero + magnitudes)


def paired_seeds(args: argparse.Namespace, console: Console) -> int:
    """Train float32 and the named method with the same seeds; show what the accuracies say."""
    first, *_, last = methods(args)
    run_all(args, [first, last], console, repeats=args.paired_seeds)
    accuracies = np.array([[100 * run["accuracy"] for run in m.runs] for m in (first, last)])
    table = Table(title=f"Test accuracy in %, {args.paired_seeds} paired seeds, {args.ranks} ranks")
    for heading in ("seed", first.label, last.label, "difference"):
        table.add_column(heading, justify="right")
    difference = accuracies[1] - accuracies[0]
    for run, (plain, compressed), gap in zip(first.runs, accuracies.T, difference, strict=True):
        table.add_row(str(run["seed"]), f"{plain:.2f}", f"{compressed:.2f}", f"{gap:+.2f}")
    table.add_section()
    columns = (*accuracies, difference)
    table.add_row("mean", *(f"{column.mean():.2f}" for column in columns))
    if args.paired_seeds > 1:
        table.add_row("deviation", *(f"{column.std(ddof=1):.2f}" for column in columns))
    console.print(table)
    if args.paired_seeds > 1:
        error = stats.sem(difference)
        width = error * stats.t.ppf(0.975, len(difference) - 1)
        console.print(
            f"{last.label} minus {first.label}: {difference.mean():+.2f} percentage points, "
            f"95% interval {difference.mean() - width:+.2f} to {difference.mean() + width:+.2f}"
        )
    equal = all(run["replicas_equal"] for m in (first, last) for run in m.runs)
    if difference.mean() < -1 or not equal:
        console.print("[bold red]failed:[/] more than 1 point lost" if equal else "ranks differ")
        return 1
    return 0


def run_all(
    args: argparse.Namespace, compared: list[Method], console: Console, repeats: int = 1
) -> None:
    """Train with each method in turn on ranks of this machine, and keep the results."""
    args.output_dir.mkdir(parents=True, exist_ok=True)
    kind = args.launcher
    if kind == "auto":
        # Over MPI the level tables travel by mpi4py, so it is the better one to show.
        kind = "mpi" if hvd.mpi_built() and "mpi" in available() else "gloo"
    ranks = Ranks(args.ranks, kind)
    for method in compared:
        begin = time.monotonic()
        with console.status(f"{method.label}: {args.ranks} ranks are training"):
            method.runs = run(args, ranks, method, repeats)["runs"]
        steps, seconds = repeats * method.runs[0]["steps"], time.monotonic() - begin
        console.print(f"{method.label}: {steps} steps, {seconds:.0f} s with start-up")


def run(args: argparse.Namespace, ranks: Ranks, method: Method, repeats: int) -> dict[str, Any]:
    """Train with a method. RanksError where ranks fail or hang."""
    stem = args.output_dir.resolve() / f"mnist_{method.compression}"
    results, log = stem.with_suffix(".json"), stem.with_suffix(".log")
    results.unlink(missing_ok=True)
    command = [sys.executable, str(SCRIPT), "--no-cuda", "--repeats", str(repeats)]
    command += ["--compression", method.compression, *method.options, "--json", str(results)]
    for name in FORWARDED:
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    environment = ranks.environment() | {"OMP_NUM_THREADS": "1"}
    job = Job(ranks.command(command), args.timeout * repeats, environment=environment, output=log)
    status = job.wait()
    if status == 0 and results.exists():
        return json.loads(results.read_text())
    reason = f"exit status {status}" if status else "no results were written"
    if status is None:
        reason = f"did not end within {args.timeout * repeats:g} s, so its ranks were killed"
    tail = "\n".join(job.text().splitlines()[-30:])
    raise RanksError(f"{method.label}: {reason}. The end of {log}:\n{tail}")
