"""Define what commands share: parsers, JSON for machines, and tables for narrow terminals."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from rich.console import Console
from rich.table import Table

Run = Callable[[argparse.Namespace], int]
WIDTH = 130
LEAST_TEXT = 12  # characters of a column of text before it is folded
OK, PROBLEM = 0, 1


def add_command(
    commands: Any, name: str, run: Run, summary: str, description: str, epilog: str
) -> argparse.ArgumentParser:
    """Add a command to the parser of several, and return its own parser.

    ``run`` is called with the parsed arguments, which contain the parser, and returns the exit
    status.
    """
    texts = {"help": summary, "description": description, "epilog": epilog}
    form = argparse.RawDescriptionHelpFormatter
    parser: argparse.ArgumentParser = commands.add_parser(name, **texts, formatter_class=form)
    parser.set_defaults(run=run, parser=parser)
    return parser


def script_parser(documentation: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help has a script's documentation as it is written."""
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=documentation, formatter_class=form)


class _Console(Console):
    """Console that leaves a reader who closes the pipe to ``tools.cli``."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console() -> Console:
    """Return standard output's console.

    If standard output is no terminal, the console is ``COLUMNS`` characters wide, or ``WIDTH`` if
    this variable is not set.
    """
    own = _Console(highlight=False)
    wide = own.is_terminal or os.environ.get("COLUMNS", "").isdecimal()
    return own if wide else _Console(width=WIDTH, highlight=False)


def errors() -> Console:
    """Return standard error's console, for what is not the result."""
    return Console(stderr=True, soft_wrap=True, highlight=False)


def print_failure(error: Exception, hints: Sequence[str] = (), lines: int = 15) -> None:
    """Print an error, the last lines of its ``output``, if any, and what to do, to standard
    error."""
    out = errors()
    for line in getattr(error, "output", "").splitlines()[-lines:]:
        out.print(f"  {line}", style="dim", markup=False)
    out.print(f"error: {error}", style="red", markup=False)
    for hint in hints:
        out.print(f"  what to do: {hint}", markup=False)


def print_json(data: Any) -> None:
    """Print JSON to standard output. NaN and infinity, which JSON does not have, become null."""
    print(json.dumps(json.loads(json.dumps(data), parse_constant=lambda name: None), indent=1))


def whole(least: int) -> Callable[[str], int]:
    """Return a parser of integers from ``least`` on; "_" and "," may separate digits."""

    def parse(text: str) -> int:
        digits = text.replace("_", "").replace(",", "")
        if not digits.isdecimal() or int(digits) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: must be an integer of {least} or more")
        return int(digits)

    return parse


def positive(text: str) -> float:
    """Parse a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number above 0")
    return value


def number(text: str) -> int | float:
    """Parse a number above 0; an integer remains one."""
    return int(text) if text.isdecimal() and int(text) else positive(text)


def seconds(value: float | None) -> str:
    """Format seconds in the unit that fits."""
    if value is None:
        return "-"
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{1e6 * value:.3g} µs"


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], **options: Any) -> None:
    """Print a table to standard output, however narrow the terminal is, with all numbers;
    ``options`` are those of ``make_table``."""
    out, table = console(), make_table(headings, rows, **options)
    needed = sum(3 + (column.min_width or 0) for column in table.columns) + 1  # with borders
    out.width = max(out.width, needed)
    out.print(table, markup=False)


def make_table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    texts: int = 1,
    styles: Sequence[str | None] = (),
    **options: Any,
) -> Table:
    """Return a table whose first ``texts`` columns hold text, which may be folded, and whose others
    hold numbers. ``options`` are those of ``rich.table.Table``."""
    table = Table(caption_justify="left", **options)
    number: Any = {"justify": "right", "no_wrap": True}
    text: Any = {"overflow": "fold"}
    for place, cells in enumerate(zip_longest(headings, *rows, fillvalue="")):
        width = max(len(line) for cell in cells for line in cell.split("\n"))
        if place < texts:
            table.add_column(cells[0], min_width=min(width, LEAST_TEXT), **text)
        else:
            table.add_column(cells[0], min_width=width, **number)
    for row, style in zip(rows, styles or [None] * len(rows), strict=True):
        table.add_row(*row, style=style)
    return table
