"""Define `hvd-adaptive plan`."""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import asdict, replace

from hvd_adaptive.tools import launch, output
from hvd_adaptive.tools.bench.models import MODELS, tensors_and_coordinates

HELP = "predict what compression would save, and recommend a method"
DESCRIPTION = """\
Predict the time of a training step with float32, float16 and schemes, and
recommend one, or none. Codecs and Horovod's calls are measured on this machine
in less than ten seconds, or twenty if kernels must be compiled. Run it on a
node of the cluster. The time on the link alone is printed at once, then a
table, and the formula with all its numbers. GPUs, NCCL and
exchange="hierarchical" are not in the model.

  hvd-adaptive plan --model resnet50 --ranks 16 --bandwidth 10gbit
  hvd-adaptive plan --params 340000000 --ranks 8 --bandwidth 100G \\
      --compute-ms 250 --methods "ALQ(bits=4)" "EDEN(bits=2)\""""
EXIT_CODES = """\
exit status: 0 predicted, 1 ranks could not be started here, 2 wrong arguments"""
DEFAULTS = ("ALQ(bits=3)", "EDEN(bits=2)")


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the `hvd-adaptive` parser."""
    parser = output.add_command(commands, "plan", run, HELP, DESCRIPTION, EXIT_CODES)
    add = parser.add_argument
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--model", choices=MODELS, metavar="NAME", help=", ".join(MODELS))
    size.add_argument("--params", type=output.whole(1), metavar="N", help="number of parameters")
    add("--tensors", type=output.whole(1), metavar="N", help="tensors (default: the model's)")
    add("--ranks", type=output.whole(2), metavar="N", required=True, help="number of ranks")
    shared = "ranks per host (default 1); they share one link"
    add("--ranks-per-host", type=output.whole(1), metavar="N", default=1, help=shared)
    rate = "rate of a host's link in bits per second: 25gbit, 25G, 100mbit"
    add("--bandwidth", type=bandwidth, metavar="RATE", required=True, help=rate)
    latency = "microseconds of a message (default %(default)g)"
    add("--latency-us", type=output.positive, metavar="US", default=50.0, help=latency)
    compute = "milliseconds of forward and backward pass without any exchange"
    add("--compute-ms", type=output.positive, metavar="MS", default=0.0, help=compute)
    add("--cores", type=output.positive, metavar="N", help="cores of each host (default: as here)")
    launcher = "whose collectives (default: mpi if it is there)"
    add("--launcher", choices=launch.LAUNCHERS, help=launcher)
    methods = f"schemes, as in Python (default: {', '.join(DEFAULTS)}); stock methods are added"
    add("--methods", "--schemes", nargs="+", default=DEFAULTS, metavar="METHOD", help=methods)
    add("--json", action="store_true", help="print JSON")


def bandwidth(text: str) -> float:
    """Return the bytes per second of a rate such as "10gbit", or raise ArgumentTypeError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg])(?:bit|bits|bps|bit/s)?", text.lower())
    if match is None or not float(match[1]):
        rates = "must be a rate such as 10gbit, 25G or 100mbit, in bits per second"
        raise argparse.ArgumentTypeError(f"{text!r}: {rates}")
    return float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]] / 8


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    from hvd_adaptive.tools.methods import parse
    from hvd_adaptive.tools.plan import model, worker

    ranks, per_host, error = arguments.ranks, arguments.ranks_per_host, arguments.parser.error
    if ranks % per_host:
        error(f"--ranks-per-host {per_host}: must divide --ranks {ranks}")
    try:
        methods = parse(arguments.methods)
    except ValueError as problem:
        error(f"--methods {problem}")
    if not any(method.is_scheme for method in methods):
        error(f"--methods {' '.join(arguments.methods)}: must name a scheme")
    launcher = arguments.launcher or (launch.available() or ["mpi"])[0]
    tensors, coordinates = tensors_and_coordinates(arguments.model, arguments.params)
    size = arguments.tensors or tensors, coordinates
    if size[0] > coordinates:
        error(f"--tensors {size[0]}: must be at most the number of parameters, {coordinates}")
    cores, rate = arguments.cores or float(len(os.sched_getaffinity(0))), arguments.bandwidth
    latency, compute_s = arguments.latency_us * 1e-6, arguments.compute_ms * 1e-3
    job = model.Job(*size, ranks, rate, per_host, latency, cores, compute_s)
    alone = model.predict(replace(job, compute_s=0.0), model.Machine(launcher, 0.0, 0.0, 0.0))
    link = ", ".join(f"{p.method} {output.seconds(p.step_s)} by {p.exchange}" for p in alone)
    output.errors().print(f"on the link alone: {link}; now measuring this machine", markup=False)
    try:
        machine = worker.constants(arguments.methods, ranks, launcher)
    except launch.RanksError as problem:
        what = [*launch.hints(problem.output), "hvd-adaptive doctor says more"]
        output.print_failure(problem, what, lines=10)
        return output.PROBLEM
    predictions = model.predict(job, machine)
    choice, reason = model.advise(predictions)
    compression = model.in_script(choice)
    if arguments.json:
        rows = [asdict(p) for p in predictions]
        plan = {"job": asdict(job), "machine": asdict(machine), "predictions": rows}
        output.print_json(plan | {"recommended": {"compression": compression, "why": reason}})
    else:
        model.show(predictions, choice)
        output.console().print(model.explained(job, machine), markup=False, soft_wrap=True)
        said = f"recommended: {compression}\n  {reason}"
        output.console().print(said, style="bold", markup=False, soft_wrap=True)
    return output.OK
