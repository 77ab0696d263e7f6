"""Define `hvd-adaptive bench codec` and `hvd-adaptive bench exchange`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from hvd_adaptive.coding import CODINGS
from hvd_adaptive.tools import launch, output
from hvd_adaptive.tools.bench.models import MODELS, tensors_and_coordinates
from hvd_adaptive.tools.output import whole
from hvd_adaptive.tools.schemes.command import scheme_name

CODEC = """\
Time encoding, and decoding with accumulation, of every scheme against memcpy,
on random data, in one run. Compare ratios, and figures of the same run."""
EXCHANGE = """\
Time one exchange of a model's gradients, from the first backward hook to the
end of optimizer.step(), on ranks of this machine or of the given hosts: stock
Horovod's float32 and float16, and schemes. The backward pass takes no time.

    hvd-adaptive bench exchange --ranks 4 --model resnet18
    hvd-adaptive bench exchange --ranks 8 --hosts node1:4,node2:4 \\
        --methods float32 "ALQ(bits=2)"
"""
EXIT_CODES = """\
exit status: 0 measured, 1 ranks could not be started or failed,
2 wrong arguments"""
METHODS = (
    "float32",
    "float16",
    "ALQ(bits=3)",
    "ALQ(bits=3, exchange='scatter_reduce')",
    "ECDQ(bits=2)",
)


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the `hvd-adaptive` parser."""
    parser = commands.add_parser(
        "bench",
        help="measure codecs on this machine, or exchanges between ranks",
        description="Measure codecs on this machine, or exchanges between ranks.",
    )
    kinds = parser.add_subparsers(title="what to measure", metavar="KIND", required=True)
    _register_codec(kinds)
    _register_exchange(kinds)


def _register_codec(kinds: Any) -> None:
    what, codes = "encode and decode against memcpy", "exit status: 0 measured, 2 wrong arguments"
    add = output.add_command(kinds, "codec", run_codec, what, CODEC, codes).add_argument
    names = "such as ALQ QSGD (default: all)"
    add("--schemes", type=scheme_name, nargs="+", metavar="NAME", help=names)
    bits = "of schemes that have bits (default: 2 to 8; ECDQ and EDEN: others, and fractions)"
    add("--bits", type=output.number, nargs="+", metavar="B", help=bits)
    words: Any = {"choices": CODINGS, "nargs": "+", "default": ["fixed"], "metavar": "CODING"}
    codings = f"lossless codings of table schemes: {', '.join(CODINGS)} (fixed)"
    add("--codings", **words, help=codings)
    add("--threads", type=whole(1), default=1, metavar="N", help="threads of a codec (1)")
    size = "coordinates of the gradient (%(default)s)"
    add("--coordinates", type=whole(1), default=11_700_000, metavar="N", help=size)
    bucket = "coordinates of a bucket (8192)"
    add("--bucket-size", type=whole(1), default=8192, metavar="N", help=bucket)
    add("--norm", choices=("l2", "linf"), help="of table schemes (default: each one's own)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: the current GPU")
    add("--rounds", type=whole(1), default=15, metavar="N", help="timings of each action (15)")
    add("--json", action="store_true", help="print JSON, seconds of each action")


def _register_exchange(kinds: Any) -> None:
    what = "an exchange of a model's gradients between ranks"
    parser = output.add_command(kinds, "exchange", run_exchange, what, EXCHANGE, EXIT_CODES)
    add = parser.add_argument
    size = parser.add_mutually_exclusive_group()
    models = f"{', '.join(MODELS)} (%(default)s)"
    size.add_argument("--model", choices=MODELS, default="resnet18", metavar="MODEL", help=models)
    params = "number of coordinates, instead of a model"
    size.add_argument("--params", type=whole(1), metavar="N", help=params)
    add("--ranks", type=whole(1), default=2, help="number of ranks (%(default)s)")
    add("--hosts", help="hosts with their numbers of ranks: node1:4,node2:4 (this machine)")
    launcher = "mpirun or horovodrun --gloo (default: mpirun)"
    add("--launcher", choices=launch.LAUNCHERS, help=launcher)
    methods = 'float32, float16, or a scheme as in Python: "ALQ(bits=3, clip=2.5)"'
    add("--methods", nargs="+", metavar="METHOD", help=methods)
    add("--steps", type=whole(2), default=10, help="timed steps of each method (%(default)s)")
    seconds = "seconds after which ranks are ended (%(default)s)"
    add("--timeout", type=output.positive, default=600, help=seconds)
    add("--json", action="store_true", help="print JSON")


def run_codec(arguments: argparse.Namespace) -> int:
    """Measure, print, and return the exit status."""
    import torch

    from hvd_adaptive.tools.bench import codec

    error = arguments.parser.error
    if arguments.device == "cuda" and not torch.cuda.is_available():
        error("--device cuda: torch sees no GPU here")
    arguments.schemes = arguments.schemes or codec.NAMES
    known = vars(arguments).keys() & codec.Options.__dataclass_fields__
    options = codec.Options(**{name: vars(arguments)[name] for name in known})
    results, size = {}, 4 * options.coordinates / 1e9
    try:
        for label, times in codec.run(options):
            results[label] = times
            speeds = (f"{name} {size / times[name]:.2f} GB/s" for name in ("encode", "decode"))
            output.errors().print(f"{label}: {', '.join(speeds)}", markup=False)
    except ValueError as problem:  # bits that a scheme does not take
        error(str(problem))
    if arguments.json:
        output.print_json({"options": asdict(options), "results": results})
    else:
        _print_codec(results, options)
    return output.OK


def _print_codec(results: dict[str, dict[str, float]], options: Any) -> None:
    headings = ("scheme", "bits", "memcpy", "encode\n/ memcpy", "decode\n/ memcpy", "checksum")
    rows = [
        (
            label,
            f"{t['bits']:.3f}",
            f"{4e-9 * options.coordinates / t['memcpy']:.1f}",
            f"{t['memcpy'] / t['encode']:.2f}",
            f"{t['memcpy'] / t['decode']:.2f}",
            f"{100 * max(0.0, t['checksum']) / t['sealed']:.1f} %",
        )
        for label, t in results.items()
    ]
    title = f"{options.device}: {options.coordinates:,} coordinates, bucket {options.bucket_size}"
    title += f", norm {options.norm}" if options.norm else ""
    caption = (
        "memcpy: GB/s; / memcpy: times as fast as a memcpy of the float32, decode adds to a sum; "
        "checksum: its share of a payload's encoding"
    )
    output.print_table(headings, rows, title=title, caption=caption)


def run_exchange(arguments: argparse.Namespace) -> int:
    """Measure, print, and return the exit status."""
    from hvd_adaptive.tools.methods import parse

    try:
        methods = [method.label for method in parse(arguments.methods or METHODS)]
    except ValueError as error:
        arguments.parser.error(f"--methods {error}")
    tensors, coordinates = tensors_and_coordinates(arguments.model, arguments.params)
    kinds = [arguments.launcher] if arguments.launcher else [*launch.available(), "mpi"]
    ranks = launch.Ranks(arguments.ranks, kinds[0], arguments.hosts)
    size = {"tensors": tensors, "coordinates": coordinates}
    plan = size | {"steps": arguments.steps, "methods": methods}
    try:
        with output.errors().status("ranks are measuring"):
            words = ["-m", "hvd_adaptive.tools.bench.worker", json.dumps(plan)]
            results = launch.run_ranks(words, ranks, arguments.timeout)
        if len(results) != 1:
            raise launch.RanksError(f"{len(results)} ranks sent figures, not the first rank alone")
    except launch.RanksError as error:
        output.print_failure(error, launch.hints(error.output))
        return output.PROBLEM
    found = {**size, "launcher": ranks.launcher, **results[0]}
    if arguments.json:
        output.print_json(found)
    else:
        _print_exchange(found)
    return output.OK


def _print_exchange(found: dict[str, Any]) -> None:
    names = ("encode_s", "exchange_s", "decode_s")
    headings = ("method", "ms", "/ float32", "sent MB", "error", "encode", "wait", "decode")
    methods = found["methods"]
    float32 = next((row["seconds"] for row in methods if row["method"] == "float32"), None)

    def cell(value: float | None, scale: float, form: str) -> str:
        return "-" if value is None else f"{value * scale:{form}}"

    rows = [
        (
            row["method"],
            cell(row["seconds"], 1e3, ".1f"),
            cell(float32 and row["seconds"] / float32, 1, ".2f"),
            cell(row["wire_bytes"], 1e-6, ".2f"),
            cell(row["relative_error"], 1, ".3g"),
            *(cell(row[name], 1e3, ".1f") for name in names),
        )
        for row in methods
    ]
    what = f"{found['coordinates']:,} coordinates in {found['tensors']} tensors"
    where = f"{found['ranks']} ranks on {found['hosts']} hosts, {found['launcher']}"
    caption = "ms of the slowest rank, median over steps; wait: in Horovod, for other ranks"
    output.print_table(headings, rows, title=f"{what}, {where}", caption=caption)
