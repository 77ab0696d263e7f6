"""Define `hvd-adaptive bench codec` and `hvd-adaptive bench exchange`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvd_adaptive.coding import CODINGS
from hvd_adaptive.tools import launch
from hvd_adaptive.tools.bench.models import MODELS, tensors_and_coordinates
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
    parser = kinds.add_parser(
        "codec",
        help="encode and decode against memcpy",
        description=CODEC,
        epilog="exit status: 0 measured, 2 wrong arguments",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--schemes", nargs="+", metavar="NAME", help="such as ALQ QSGD (default: all)")
    add(
        "--bits",
        type=whole(2),
        nargs="+",
        metavar="B",
        help="of schemes that have bits (default: 2 to 8, and those that ECDQ and EDEN have)",
    )
    codings = ", ".join(CODINGS)
    add(
        "--codings",
        choices=CODINGS,
        nargs="+",
        default=["fixed"],
        metavar="CODING",
        help=f"lossless codings of table schemes: {codings} (fixed)",
    )
    add("--threads", type=whole(1), default=1, metavar="N", help="threads of a codec (1)")
    add(
        "--coordinates",
        type=whole(1),
        default=11_700_000,
        metavar="N",
        help="coordinates of the gradient (%(default)s)",
    )
    add(
        "--bucket-size",
        type=whole(1),
        default=8192,
        metavar="N",
        help="coordinates of a bucket (8192)",
    )
    add("--norm", choices=("l2", "linf"), help="of table schemes (default: each one's own)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: the current GPU")
    add("--rounds", type=whole(1), default=15, metavar="N", help="timings of each action (15)")
    add("--json", action="store_true", help="print JSON, seconds of each action")
    add("--output", type=Path, metavar="FILE", help="write that JSON to a file, too")
    parser.set_defaults(run=lambda arguments: run_codec(arguments, parser))


def _register_exchange(kinds: Any) -> None:
    parser = kinds.add_parser(
        "exchange",
        help="an exchange of a model's gradients between ranks",
        description=EXCHANGE,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--model",
        choices=MODELS,
        default="resnet18",
        metavar="MODEL",
        help=f"{', '.join(MODELS)} (%(default)s)",
    )
    size.add_argument(
        "--params", type=whole(1), metavar="N", help="number of coordinates, instead of a model"
    )
    add("--ranks", type=whole(1), default=2, help="number of ranks (%(default)s)")
    add("--hosts", help="hosts with their numbers of ranks: node1:4,node2:4 (this machine)")
    add(
        "--launcher", choices=launch.LAUNCHERS, help="mpirun or horovodrun --gloo (default: mpirun)"
    )
    add(
        "--methods",
        nargs="+",
        metavar="METHOD",
        help='float32, float16, or a scheme as in Python: "ALQ(bits=3, clip=2.5)"',
    )
    add("--steps", type=whole(2), default=10, help="timed steps of each method (%(default)s)")
    add(
        "--timeout",
        type=positive,
        default=600,
        help="seconds after which ranks are ended (%(default)s)",
    )
    add("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=lambda arguments: run_exchange(arguments, parser))


def run_codec(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Measure, print, and return the exit status."""
    import torch

    from hvd_adaptive.tools.bench import codec

    names = {name.lower(): name for name in codec.NAMES}
    asked = arguments.schemes or list(names.values())
    for name in asked:
        if name.lower() not in names:
            parser.error(f"--schemes {name}: must be among {', '.join(names.values())}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here")
    options = codec.Options(
        schemes=[names[name.lower()] for name in asked],
        bits=arguments.bits,
        codings=arguments.codings,
        coordinates=arguments.coordinates,
        norm=arguments.norm,
        bucket_size=arguments.bucket_size,
        rounds=arguments.rounds,
        threads=arguments.threads,
        device=arguments.device,
    )
    try:
        results, size = {}, 4 * options.coordinates / 1e9
        for label, times in codec.run(options):
            results[label] = times
            speeds = (f"{name} {size / times[name]:.2f} GB/s" for name in ("encode", "decode"))
            errors().print(f"{label}: {', '.join(speeds)}", markup=False)
    except ValueError as error:  # bits that a scheme does not take
        parser.error(str(error))
    if arguments.output is not None or arguments.json:
        written = {"options": asdict(options), "results": results}
        if arguments.output is not None:
            arguments.output.write_text(json.dumps(written, indent=1), encoding="utf-8")
        if arguments.json:
            print_json(written)
            return OK
    _print_codec(results, options)
    return OK


def _print_codec(results: dict[str, dict[str, float]], options: Any) -> None:
    gigabytes = 4 * options.coordinates / 1e9
    columns = [
        Column("scheme", text=True),
        Column("bits"),
        Column("memcpy", drop=3, about="memcpy, GB/s"),
        Column("encode", drop=2, about="encode, GB/s of float32"),
        Column("encode\n/ memcpy", about="/ memcpy: times as fast as a memcpy of the float32"),
        Column("decode\n+ add", drop=2, about="decode + add, GB/s of float32"),
        Column("decode\n/ memcpy"),
        Column("checksum", drop=1, about="checksum: its share of a payload's encoding"),
    ]
    rows = [
        (
            label,
            f"{t['bits']:.3f}",
            f"{gigabytes / t['memcpy']:.1f}",
            f"{gigabytes / t['encode']:.2f}",
            f"{t['memcpy'] / t['encode']:.2f}",
            f"{gigabytes / t['decode']:.2f}",
            f"{t['memcpy'] / t['decode']:.2f}",
            _share(t["checksum"], t["checksum_error"], t["sealed"]),
        )
        for label, t in results.items()
    ]
    out = console()
    table = make_table(
        columns,
        rows,
        out.width,
        title=f"{options.device}: {options.coordinates:,} coordinates, "
        f"bucket {options.bucket_size}" + (f", norm {options.norm}" if options.norm else ""),
    )
    out.print(table, markup=False)


def _share(part: float, error: float, whole: float) -> str:
    """Return a measured part in percent, or a bound if it is not above its standard error, or "-"
    if that says nothing."""
    if part > error:
        return f"{100 * part / whole:.1f} %"
    bound = max(error, part + 2 * error) / whole
    return f"< {100 * bound:.1f} %" if bound < 1 else "-"


def run_exchange(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Measure, print, and return the exit status."""
    from hvd_adaptive.tools.bench import exchange
    from hvd_adaptive.tools.methods import parse

    try:
        methods = [method.label for method in parse(arguments.methods or exchange.DEFAULTS)]
    except ValueError as error:
        parser.error(f"--methods {error}")
    model = None if arguments.params else arguments.model
    tensors, coordinates = tensors_and_coordinates(model, arguments.params)
    kinds = [arguments.launcher] if arguments.launcher else [*launch.available(), "mpi"]
    ranks = launch.Ranks(arguments.ranks, kinds[0], arguments.hosts)
    try:
        with errors().status("ranks are measuring"):
            rows, where = exchange.measure(
                methods, tensors, coordinates, arguments.steps, ranks, arguments.timeout
            )
    except launch.RanksError as error:
        print_failure(error, launch.hints(error.output))
        return PROBLEM
    facts = {"tensors": tensors, "coordinates": coordinates, "launcher": ranks.launcher, **where}
    if arguments.json:
        print_json(facts | {"methods": [asdict(row) for row in rows]})
        return OK
    _print_exchange(rows, facts)
    return OK


def _print_exchange(rows: list, facts: dict[str, Any]) -> None:
    columns = [
        Column("method", text=True),
        Column("ms"),
        Column("quartiles", drop=2),
        Column("/ float32"),
        Column("sent MB"),
        Column("error"),
        Column("encode", drop=1),
        Column("wait", drop=1),
        Column("decode", drop=1),
    ]
    float32 = next((row.seconds for row in rows if row.method == "float32"), None)
    cells = []
    for row in rows:
        low, high = row.quartiles
        parts = (row.encode_s, row.exchange_s, row.decode_s)
        cells.append(
            (
                row.method,
                f"{1e3 * row.seconds:.1f}",
                f"{1e3 * low:.1f} {1e3 * high:.1f}",
                "-" if float32 is None else f"{row.seconds / float32:.2f}",
                "-" if row.wire_bytes is None else f"{row.wire_bytes / 1e6:.2f}",
                "-" if row.relative_error is None else f"{row.relative_error:.3g}",
                *("-" if part is None else f"{1e3 * part:.1f}" for part in parts),
            )
        )
    out = console()
    table = make_table(
        columns,
        cells,
        out.width,
        title=f"{facts['coordinates']:,} coordinates in {facts['tensors']} tensors, "
        f"{facts['ranks']} ranks on {facts['hosts']} hosts, {facts['launcher']}",
        caption="ms of the slowest rank, median over steps; wait: in Horovod, for other ranks",
    )
    out.print(table, markup=False)
