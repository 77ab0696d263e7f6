"""Define `hvd-adaptive plan`."""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import asdict
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
Predict the time of a training step with float32, float16 and schemes, and
recommend one, or none. Codecs and Horovod's calls are measured on this machine
for about ten seconds: run it on a node of the cluster. The time on the link
alone comes first, then a line for each measurement. The output has the formula.
GPUs, NCCL and exchange="hierarchical" are not in the model.

  hvd-adaptive plan --model resnet50 --ranks 16 --bandwidth 10gbit
  hvd-adaptive plan --params 340000000 --ranks 8 --bandwidth 100G \\
      --compute-ms 250 --methods "ALQ(bits=4)" "EDEN(bits=2)\""""
EXIT_CODES = """\
exit status: 0 predicted, 1 ranks could not be started here, 2 wrong arguments"""
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
    size.add_argument("--model", choices=MODELS, metavar="NAME", help=", ".join(MODELS))
    size.add_argument("--params", type=whole(1), metavar="N", help="number of parameters")
    add("--tensors", type=whole(1), metavar="N", help="number of tensors (default: the model's)")
    add("--ranks", type=whole(2), metavar="N", required=True, help="number of ranks")
    add(
        "--ranks-per-host",
        type=whole(1),
        metavar="N",
        default=1,
        help="ranks per host (default 1); they share one link",
    )
    add(
        "--bandwidth",
        type=bandwidth,
        metavar="RATE",
        required=True,
        help="rate of a host's link in bits per second: 25gbit, 25G, 100mbit",
    )
    add(
        "--latency-us",
        type=positive,
        metavar="US",
        default=50.0,
        help="microseconds of a message (default %(default)g)",
    )
    add(
        "--compute-ms",
        type=positive,
        metavar="MS",
        help="milliseconds of forward and backward pass without any exchange",
    )
    add("--cores", type=positive, metavar="N", help="cores of each host (default: as here)")
    add("--launcher", choices=LAUNCHERS, help="whose collectives (default: mpi if it is there)")
    add(
        "--methods",
        "--schemes",
        dest="methods",
        nargs="+",
        metavar="METHOD",
        help='schemes, written as in Python: "ALQ(bits=3)"; float32 and float16 are always '
        "predicted",
    )
    add("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=lambda arguments: run(arguments, parser))


def bandwidth(text: str) -> float:
    """Return the bytes per second of a rate such as "10gbit".

    Raises:
        ArgumentTypeError: It is no such rate.
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
    from hvd_adaptive.tools.plan import measure as measuring
    from hvd_adaptive.tools.plan.model import (
        Cluster,
        Job,
        advise,
        by_link_alone,
        in_script,
        milliseconds,
        predict,
    )

    ranks, per_host = arguments.ranks, arguments.ranks_per_host
    if ranks % per_host:
        parser.error(f"--ranks-per-host {per_host}: must divide --ranks {ranks}")
    tensors, coordinates = tensors_and_coordinates(arguments.model, arguments.params)
    try:
        methods = parse(arguments.methods or measuring.DEFAULTS)
    except ValueError as error:
        parser.error(f"--methods {error}")
    schemes = [method.label for method in methods if method.is_scheme]
    if not schemes:
        parser.error(f"--methods {' '.join(arguments.methods)}: must name a scheme")
    cores = arguments.cores or float(len(os.sched_getaffinity(0)))
    cluster = Cluster(ranks, arguments.bandwidth, per_host, arguments.latency_us * 1e-6, cores)
    launcher = arguments.launcher or (available() or ["mpi"])[0]
    job = Job(arguments.tensors or tensors, coordinates, (arguments.compute_ms or 0.0) * 1e-3)
    out = errors()

    def show(line: str) -> None:
        out.print(line, markup=False)

    stock = by_link_alone(cluster, job, launcher)
    parts = ", ".join(f"{p.method} {milliseconds(p.wire_s)}" for p in reversed(stock))
    show(f"an exchange on the link alone: {parts}; now measuring this machine")
    try:
        with out.status("measuring this machine, about ten seconds"):
            machine = measuring.measure(schemes, ranks, launcher, show)
    except RanksError as error:
        print_failure(error, [*hints(error.output), "hvd-adaptive doctor says more"], lines=10)
        return PROBLEM
    predictions = predict(cluster, job, machine)
    choice, reason = advise(predictions)
    if arguments.json:
        print_json(
            {
                "cluster": asdict(cluster),
                "job": asdict(job),
                "machine": asdict(machine),
                "predictions": [asdict(p) for p in predictions],
                "recommended": {"compression": in_script(choice), "why": reason},
            }
        )
        return OK
    _print(predictions, choice, cluster, job, machine)
    console().print(
        f"recommended: {in_script(choice)}\n  {reason}", style="bold", markup=False, soft_wrap=True
    )
    return OK


def _print(predictions: list, choice: Any, cluster: Any, job: Any, machine: Any) -> None:
    out = console()
    names = ("method\nexchange", "step", "wire", "codec", "calls", "MB", "error")
    columns = [Column(name, text=not place, least=40) for place, name in enumerate(names)]
    faster: dict[str, Any] = {}  # exchange of each method: predictions begin with the fastest
    for prediction in predictions:
        faster.setdefault(prediction.method, prediction)
    rows = [
        (
            f"{p.method}\n{p.exchange}",
            *(
                f"{1e3 * t:,.{1 if t < 0.1 else 0}f}"
                for t in (p.step_s, p.wire_s, p.codec_s, p.calls_s)
            ),
            f"{p.sent / 1e6:,.{1 if p.sent < 1e8 else 0}f}",
            f"{p.error:.1g}{'' if p.unbiased else ' b'}",
        )
        for p in faster.values()
    ]
    styles = ["bold green" if p is choice else None for p in faster.values()]
    out.print(make_table(columns, rows, out.width, styles=styles), markup=False)
    out.print(explained(cluster, job, machine), markup=False, soft_wrap=True)


def explained(cluster: Any, job: Any, machine: Any) -> str:
    """Return the formula with its numbers, for terminals of 80 characters."""
    from hvd_adaptive.tools.plan.model import REACHED, REACHED_BY_RINGS

    share = f" / {cluster.core_share:.2g} of a core"
    copies = ", ".join(f"{name} {1e9 * t:.2g}" for name, t in machine.copy_s.items())
    calls = f"{1e6 * machine.stock_call_s:.0f} us, with a scheme {1e6 * machine.scheme_call_s:.0f}"
    codecs = [
        f"        {codec.label}: {1e9 * codec.encode_s:.2g} + k * {1e9 * codec.decode_s:.2g} ns"
        for codec in machine.codecs
    ]
    return f"""\
ms of a step: {job.coordinates:,} numbers in {job.tensors} tensors, \
{cluster.ranks} ranks on {cluster.hosts} hosts
MB: sent by a rank; error: relative, squared, of one rank; b: biased
step  = forward + max(backward, X) + min(backward, X) / groups of 16 MiB,
        X = wire + codec + calls; forward + backward: {1e3 * job.compute_s:g} ms
wire  = MB / ({8e-9 * cluster.bandwidth:g} Gbit/s * {REACHED}; \
{REACHED_BY_RINGS} for rings of 3 or more)
        + {1e6 * cluster.latency:g} us a message + MB * ns a byte{share}:
        {copies}
codec = numbers * (encode + k * decode){share}:
{chr(10).join(codecs)}
        k = ranks with allgather; with scatter_reduce 1, and the averages' codec
calls = {job.tensors} tensors * {calls} us{share}
The faster exchange of each scheme is shown; --json has both, and all numbers."""
