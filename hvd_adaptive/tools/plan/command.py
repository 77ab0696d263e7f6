"""`hvd-adaptive plan`."""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvd_adaptive.tools.bench.models import MODELS, tensors_and_coordinates
from hvd_adaptive.tools.launch import LAUNCHERS, RanksError, available, hints
from hvd_adaptive.tools.output import (
    OK,
    PROBLEM,
    console,
    errors,
    positive,
    print_failure,
    print_json,
    whole,
)
from hvd_adaptive.tools.tables import Column, make_table

DESCRIPTION = """\
Predicts a training step in float32, in float16 and with each scheme and exchange, recommends one
and says why; that may be not to compress. Codecs, collectives and whole steps are measured on this
machine (three minutes); the formulas are in hvd_adaptive/tools/plan/model.py. Run it on a node of
the cluster. GPUs and NCCL are not in the model.

    hvd-adaptive plan --model resnet50 --ranks 16 --bandwidth 10gbit --compute-ms 120
    hvd-adaptive plan --params 340000000 --ranks 8 --bandwidth 100G --methods "ALQ(bits=4)\""""
EXIT_CODES = """\
exit status: 0 predicted, 1 ranks could not be started here to measure, 2 wrong arguments"""
MEASURING, MEASURING_SCHEME = 40.0, 7.0  # seconds: of Horovod, and of each scheme; see the docs
UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the `hvd-adaptive` parser."""
    parser = commands.add_parser(
        "plan",
        help="predict what compression would save, and recommend a method",
        description=DESCRIPTION,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--model", choices=MODELS)
    size.add_argument("--params", type=whole(1), metavar="N", help="so many parameters")
    add("--tensors", type=whole(1), metavar="N", help="in so many tensors (default: the model's)")
    add("--ranks", type=whole(1), required=True)
    add("--ranks-per-host", type=whole(1), default=1, help="that share a link (1)")
    add(
        "--bandwidth",
        type=bandwidth,
        required=True,
        help="of a host's link, in bits per second: 25gbit, 25G, 100mbit",
    )
    add("--latency-us", type=positive, default=50.0, help="of a message (%(default)s)")
    add("--compute-ms", type=positive, help="forward and backward pass of a step, without exchange")
    add("--cores", type=positive, help="of each host, for Horovod and compression (as here)")
    add(
        "--launcher",
        choices=LAUNCHERS,
        help="whose collectives: Horovod's on MPI, or on Gloo, as "
        "horovodrun --gloo starts them (default: mpi where mpirun is)",
    )
    add(
        "--methods",
        "--schemes",
        dest="methods",
        nargs="+",
        metavar="METHOD",
        help='schemes as in Python: "ALQ(bits=3)"; float32 and float16 are predicted in any case',
    )
    add(
        "--constants",
        type=Path,
        metavar="FILE",
        help="what was measured: read from there, or measured and kept there",
    )
    add("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=lambda arguments: run(arguments, parser))


def bandwidth(text: str) -> float:
    """Return the bytes per second of a rate such as "10gbit".

    Raises:
        ArgumentTypeError: it is no such rate.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg])(?:bit|bits|bps|bit/s)?", text.lower())
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(
            f"{text!r}: must be a rate such as 10gbit, 25G or 100mbit, in bits per second"
        )
    return float(match[1]) * UNITS[match[2]] / 8


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run the command and return the exit status."""
    from hvd_adaptive.tools.methods import parse
    from hvd_adaptive.tools.plan import kept
    from hvd_adaptive.tools.plan import measure as measuring
    from hvd_adaptive.tools.plan.advice import advise, in_script
    from hvd_adaptive.tools.plan.model import predict
    from hvd_adaptive.tools.plan.quantities import Cluster, Conditions, Job

    if arguments.ranks % arguments.ranks_per_host:
        parser.error(
            f"--ranks-per-host {arguments.ranks_per_host}: must divide --ranks {arguments.ranks}"
        )
    tensors, coordinates = tensors_and_coordinates(arguments.model, arguments.params)
    tensors = arguments.tensors or tensors
    try:
        methods = parse(arguments.methods or measuring.DEFAULTS)
    except ValueError as error:
        parser.error(f"--methods {error}")
    schemes = [method.label for method in methods if method.is_scheme]
    if not schemes:
        named = " ".join(arguments.methods)
        parser.error(
            f"--methods {named}: must name a scheme; float32 and float16 are predicted in any case"
        )
    cores = arguments.cores or float(len(os.sched_getaffinity(0)))
    cluster = Cluster(
        arguments.ranks,
        arguments.bandwidth,
        arguments.ranks_per_host,
        arguments.latency_us * 1e-6,
        cores,
    )
    launcher = arguments.launcher or (available() or ["mpi"])[0]
    conditions = Conditions(
        cluster.ranks, cluster.hosts, tensors, coordinates, cluster.crowd, launcher
    )
    try:
        machine = kept.constants(
            arguments.constants, schemes, conditions, lambda: _measured(schemes, conditions)
        )
    except kept.KeptError as error:
        parser.error(f"--constants {error}")
    except RanksError as error:
        remedies = [*hints(error.output), "hvd-adaptive doctor says more"]
        print_failure(error, remedies, lines=10)
        return PROBLEM
    job = Job(tensors, coordinates, (arguments.compute_ms or 0.0) * 1e-3)
    predictions = sorted(predict(cluster, job, machine), key=lambda p: p.step_s)
    advice = advise(predictions, is_computing_known=arguments.compute_ms is not None)
    if arguments.json:
        print_json(
            {
                "cluster": asdict(cluster),
                "job": asdict(job),
                "machine": asdict(machine),
                "predictions": [asdict(p) for p in predictions],
                "recommended": {
                    "compression": in_script(advice.choice),
                    "why": advice.why,
                    "fastest_uncompressed": advice.uncompressed.method,
                },
            }
        )
        return OK
    _print(predictions, advice, cluster, job, machine.launcher)
    return OK


def _measured(schemes: list[str], conditions: Any) -> Any:
    """Return the constants of this machine."""
    from hvd_adaptive.tools.plan import measure as measuring

    out = errors()
    minutes = round((MEASURING + MEASURING_SCHEME * len(schemes)) / 60) or 1
    out.print(
        f"measuring this machine, which takes about {minutes} min; --constants FILE keeps the "
        "figures for the next time, and fewer --methods take less"
    )
    with out.status("measuring") as status:
        return measuring.measure(
            schemes, conditions, lambda what: status.update(f"measuring {what}")
        )


def _print(predictions: list, advice: Any, cluster: Any, job: Any, launcher: str) -> None:
    base = next(p for p in predictions if p is advice.uncompressed)
    out = console()
    compute = f", {1e3 * job.compute_s:.3g} ms of computing" if job.compute_s else ""
    columns = [
        Column("method", text=True),
        Column("exchange", text=True),
        Column("step"),
        Column(f"/ {base.method}"),
        Column("wire", drop=1),
        Column("processor", drop=2),
        Column("encode", drop=3),
        Column("decode", drop=3),
        Column("MB sent"),
        Column("error"),
    ]
    rows = [
        (
            p.method,
            p.exchange,
            f"{1e3 * p.step_s:.1f}",
            f"{p.step_s / base.step_s:.2f}" if base.step_s else "-",
            *(f"{1e3 * t:.1f}" for t in (p.wire_s, p.processor_s, p.encode_s, p.decode_s)),
            f"{p.wire_bytes / 1e6:.3g}" if p.wire_bytes < 1e9 else f"{p.wire_bytes / 1e6:,.0f}",
            f"{p.error:.2g}{'' if p.unbiased else ' b'}",
        )
        for p in predictions
    ]
    table = make_table(
        columns,
        rows,
        out.width,
        title=f"{job.coordinates:,} parameters over {cluster.ranks} ranks at "
        f"{8e-9 * cluster.bandwidth:.4g} Gbit/s{compute}, ms",
        caption="wire: bytes on a host's link, and latency; processor: all else; they overlap with "
        "computing and each other. error: relative, squared; b: biased. Exchanges are the "
        f"processor's, over {launcher}: GPUs and NCCL are not in the model.",
        styles=["bold green" if p is advice.choice else None for p in predictions],
    )
    out.print(table, markup=False)
    first, *more = advice.why
    out.print(f"recommended: {first}", style="bold", markup=False, soft_wrap=True)
    for reason in more:
        out.print(f"  {reason}", markup=False, soft_wrap=True)
