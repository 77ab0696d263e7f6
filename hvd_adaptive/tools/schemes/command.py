"""Define `hvd-adaptive schemes`."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from hvd_adaptive.tools.output import OK, add_command, console, print_json, print_table

HELP = "every scheme with its paper; --measure: bits and errors"
DESCRIPTION = """\
List every compression scheme with its method and paper. With names of
schemes, describe these in full. With --measure, print bits and errors, too."""
NOTES = """\
--measure takes about ten seconds. It quantises 262,144 normal and Laplacian
coordinates here, in buckets of 8192, with fitted tables:
  bits      bits per coordinate, scales and codes
  error     relative error ||Q(v) - v||^2 / ||v||^2, normal | Laplacian
  bound     proven maximum of the mean error for any gradient
  unbiased  whether the mean of Q(v) is v
exit status: 0, or 2 for wrong arguments"""


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the `hvd-adaptive` parser."""
    parser = add_command(commands, "schemes", run, HELP, DESCRIPTION, NOTES)
    add = parser.add_argument
    add("schemes", nargs="*", type=scheme_name, metavar="SCHEME", help="such as ALQ; all if none")
    add("--measure", action="store_true", help="measure bits and errors here")
    add("--json", action="store_true", help="print JSON; with --measure, bits and errors, too")


def scheme_name(text: str) -> str:
    """Parse a scheme's name, which may be written in small letters."""
    from hvd_adaptive.tools.schemes.catalog import scheme_classes

    names = {name.lower(): name for name in scheme_classes()}
    if text.lower() not in names:
        raise argparse.ArgumentTypeError(f"{text!r}: must be one of {', '.join(names.values())}")
    return names[text.lower()]


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    from hvd_adaptive.tools.schemes import catalog

    chosen = arguments.schemes or list(catalog.scheme_classes())
    rows = [(catalog.entry if arguments.measure else catalog.outline)(name) for name in chosen]
    if arguments.json:
        print_json(rows)
        return OK
    if arguments.schemes:
        _print_documentation(rows)
    if arguments.measure:
        _print_measured(rows)
    elif not arguments.schemes:
        _print_outlines(rows)
    return OK


def _signature(row: Mapping[str, Any]) -> str:
    """Return the call with all of a scheme's own keywords."""
    own = (f"{key}={value}" if value else key for key, value in row["keywords"].items())
    return f"{row['name']}({', '.join(own)})"


def _print_outlines(rows: Sequence[Mapping[str, Any]]) -> None:
    cells = [(_signature(row), row["method"]) for row in rows]
    caption = (
        "hvd-adaptive schemes NAME describes one scheme, hvd-adaptive schemes --measure prints "
        "bits and errors of all."
    )
    headings = ("scheme, its own keywords", "method")
    print_table(headings, cells, texts=2, caption=caption, show_lines=True)


def _print_measured(rows: Sequence[Mapping[str, Any]]) -> None:
    headings = ("scheme", "bits", "error, normal | Laplacian", "bound", "unbiased")
    cells = [
        (
            row["call"],
            f"{row['bits']:.2f}",
            f"{row['relative_error']:.3g} | {row['laplacian_error']:.3g}",
            "-" if row["bound"] is None else f"{row['bound']:.3g}",
            "yes" if row["unbiased"] else "no",
        )
        for row in rows
    ]
    print_table(headings, cells)
    console().print("hvd-adaptive schemes --help explains the columns", markup=False)


def _print_documentation(rows: Sequence[Mapping[str, Any]]) -> None:
    from hvd_adaptive.settings import Settings

    out = console()
    for row in rows:
        out.print(_signature(row), style="bold", markup=False)
        out.print(f"\n{row['documentation']}\n", markup=False)
    shared = (inspect.getdoc(Settings) or "").partition("\n\n")[2]
    out.print("Shared keywords, of every scheme", style="bold")
    out.print(f"\n{shared}\n", markup=False)
