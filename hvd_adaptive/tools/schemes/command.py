"""`hvd-adaptive schemes`."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from hvd_adaptive.tools.output import OK, console, print_json
from hvd_adaptive.tools.tables import Column, make_table

WIDE = 110  # characters from which on keywords are shown

DESCRIPTION = """\
Lists every compression scheme with its paper, its own parameters, its bits a coordinate and its
error, measured here on a quarter of a million normal and Laplacian coordinates; with names of
schemes, all there is to know of these."""
NOTES = """\
bits: of a coordinate, with scales and codes.  error: ‖Q(v) - v‖² / ‖v‖² on normal | Laplacian
coordinates in buckets of 8192, level tables fitted.  bound: of its mean for any gradient, as it is
proved.  exit status: 0, or 2 for wrong arguments"""


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the `hvd-adaptive` parser."""
    parser = commands.add_parser(
        "schemes",
        help="every scheme with its paper, parameters, bits and bounds",
        description=DESCRIPTION,
        epilog=NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="SCHEME", help="such as ALQ; all where none")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=lambda arguments: run(arguments, parser))


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run the command and return the exit status."""
    from hvd_adaptive.tools.schemes.catalog import entry, scheme_classes

    by_name = {name.lower(): name for name in scheme_classes()}
    for name in arguments.names:
        if name.lower() not in by_name:
            parser.error(f"{name!r}: must be one of {', '.join(by_name.values())}")
    asked = [by_name[name.lower()] for name in arguments.names] or list(by_name.values())
    entries = [entry(name) for name in asked]
    if arguments.json:
        print_json([asdict(one) for one in entries])
    elif arguments.names:
        _print_all(entries)
    else:
        _print_table(entries)
    return OK


def _print_table(entries: list) -> None:
    out = console()
    wide = out.width >= WIDE
    columns = [
        Column("scheme, its own keywords" if wide else "scheme", text=True, least=34),
        Column("method", text=True, least=28, drop=1),
        Column("bits"),
        Column("error"),
        Column("bound"),
        Column("unbiased"),
    ]
    rows = [
        (
            _signature(one) if wide else one.name,
            one.method,
            f"{one.bits:.2f}",
            _errors(one),
            "-" if one.bound is None else f"{one.bound:.3g}",
            "yes" if one.unbiased else "no",
        )
        for one in entries
    ]
    caption = NOTES.partition("  exit")[0].replace("\n", " ")
    if not wide:
        caption += "  `hvd-adaptive schemes NAME` prints a scheme's method and keywords."
    table = make_table(columns, rows, out.width, caption=caption, lines=wide)
    out.print(table, markup=False)


def _print_all(entries: list) -> None:
    from hvd_adaptive.settings import Settings

    out = console()
    for one in entries:
        proved = "no bound is proved" if one.bound is None else f"at most {one.bound:.3g}"
        out.print(
            _signature(one),
            style="bold",
            markup=False,
        )
        out.print(f"\n{one.documentation}\n", markup=False)
        out.print(
            f"Here, {one.call}: {one.bits:.3f} bits a coordinate, relative squared error "
            f"{_errors(one)} on normal | Laplacian coordinates, for any gradient {proved}; "
            f"{'unbiased' if one.unbiased else 'biased'}.\n",
            markup=False,
        )
    out.print("Shared keywords, of every scheme", style="bold")
    out.print(f"\n{(Settings.__doc__ or '').partition(chr(10))[2].strip(chr(10))}", markup=False)


def _errors(one: Any) -> str:
    return f"{one.relative_error:.3g} | {one.laplacian_error:.3g}"


def _signature(one: Any) -> str:
    return f"{one.name}({', '.join(_keyword(*pair) for pair in one.keywords.items())})"


def _keyword(name: str, default: str) -> str:
    return f"{name}={default}" if default else name
