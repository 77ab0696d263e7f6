"""Define `hvd-adaptive schemes`."""

from __future__ import annotations

import argparse
import re
import textwrap
from dataclasses import asdict
from typing import Any

from hvd_adaptive.tools.output import OK, add_command, console, print_json, print_table
from hvd_adaptive.tools.schemes.outline import Outline, outline, outlines, shared_keywords

WIDE = 110  # characters from which on keywords are shown
ITEM = re.compile(r" *(- |\d+\. )")
# A line break inside of a paragraph: no section, keyword or item of a list begins after it.
CONTINUED = re.compile(rf"(?<=[^\n])\n(?!\n|\w+:\n|    \S|{ITEM.pattern}) *")

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
    add("schemes", nargs="*", type=outline, metavar="SCHEME", help="such as ALQ; all if none")
    add("--measure", action="store_true", help="measure bits and errors here")
    add("--json", action="store_true", help="print JSON; with --measure, bits and errors, too")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    chosen = arguments.schemes or outlines()
    if arguments.schemes and not arguments.json:
        _print_documentation(chosen)
    if arguments.measure:
        from hvd_adaptive.tools.schemes.catalog import entry

        entries = [entry(one) for one in chosen]
        if arguments.json:
            print_json([asdict(one) for one in entries])
        else:
            _print_measured(entries)
    elif arguments.json:
        print_json([asdict(one) for one in chosen])
    elif not arguments.schemes:
        _print_outlines(chosen)
    return OK


def _print_outlines(chosen: list[Outline]) -> None:
    wide = console().width >= WIDE
    heading = "scheme, its own keywords" if wide else "scheme"
    rows = [(one.signature if wide else one.name, one.method) for one in chosen]
    caption = (
        "hvd-adaptive schemes NAME describes one scheme, hvd-adaptive schemes --measure prints "
        "bits and errors of all."
    )
    print_table((heading, "method"), rows, texts=2, caption=caption, show_lines=wide)


def _print_measured(entries: list) -> None:
    headings = ("scheme", "bits", "error, normal | Laplacian", "bound", "unbiased")
    rows = [
        (
            one.call,
            f"{one.bits:.2f}",
            f"{one.relative_error:.3g} | {one.laplacian_error:.3g}",
            "-" if one.bound is None else f"{one.bound:.3g}",
            "yes" if one.unbiased else "no",
        )
        for one in entries
    ]
    print_table(headings, rows)
    console().print("hvd-adaptive schemes --help explains the columns", markup=False)


def _print_documentation(chosen: list[Outline]) -> None:
    out = console()
    for one in chosen:
        out.print(one.signature, style="bold", markup=False)
        out.print(f"\n{filled(one.documentation, out.width)}\n", markup=False)
    out.print("Shared keywords, of every scheme", style="bold")
    out.print(f"\n{filled(shared_keywords(), out.width)}\n", markup=False)


def filled(documentation: str, width: int) -> str:
    """Return a docstring whose paragraphs and items have lines of ``width`` characters."""
    text, heading, examples = documentation.partition("\n\nExamples:\n")
    lines = CONTINUED.sub(" ", text).splitlines()
    return "\n".join(_wrapped(line, width) for line in lines) + heading + examples


def _wrapped(line: str, width: int) -> str:
    item = ITEM.match(line)
    below = " " * (len(item[0]) if item else 2 * (len(line) - len(line.lstrip())))
    whole: Any = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(line, width, subsequent_indent=below, **whole)
