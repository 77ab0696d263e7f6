"""Define what commands share: parsers, JSON for machines, and tables for narrow terminals."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

Run = Callable[[argparse.Namespace], int]
WIDTH = 130
OK, PROBLEM = 0, 1
BORDER, PADDING = 1, 3  # characters: of a table's left edge, and of each column's edge and spaces
LEAST_TEXT = 24  # characters of a column of text, unless its cells are shorter


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


def console() -> Console:
    """Return standard output's console.

    If standard output is no terminal, the console is ``COLUMNS`` characters wide, or ``WIDTH`` if
    this variable is not set.
    """
    own = Console(highlight=False)
    wide = own.is_terminal or os.environ.get("COLUMNS", "").isdecimal()
    return own if wide else Console(width=WIDTH, highlight=False)


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


def seconds(value: float | None) -> str:
    """Format seconds in the unit that fits."""
    if value is None:
        return "-"
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{1e6 * value:.3g} µs"


@dataclass(frozen=True)
class Column:
    """Column of a table.

    Args:
        heading: what it shows; lines are separated by a line break.
        text: whether it holds text, which may be folded, instead of numbers.
        drop: if the table is too wide, the columns with the largest ``drop`` are left out first,
            all of them; a column with 0 is always shown.
        least: characters below which a column of text is not folded.
        about: what the column holds, for the caption of a table that shows the column.
    """

    heading: str
    text: bool = False
    drop: int = 0
    least: int = LEAST_TEXT
    about: str = ""


def print_table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], least_width: int = 0, **options: Any
) -> None:
    """Print a table to standard output, in at least ``least_width`` characters.

    ``options`` are those of ``make_table``.
    """
    out = console()
    out.print(make_table(columns, rows, max(out.width, least_width), **options), markup=False)


def make_table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    width: int,
    *,
    title: str = "",
    caption: str = "",
    styles: Sequence[str | None] = (),
    lines: bool = False,
    more: str = "--json prints all",
) -> Table:
    """Return a table that fits into ``width`` characters, with ``lines`` between rows.

    What the shown columns hold is added to the caption, and the names of columns that do not fit
    with ``more``, which says how to see them.

    Raises:
        ValueError: a row does not have a cell for each column.
    """
    if any(len(row) != len(columns) for row in rows):
        raise ValueError(f"rows: each must have {len(columns)} cells, one for each column")
    shown = fitting(columns, rows, width)
    caption = "; ".join(filter(None, [caption, *(columns[place].about for place in shown)]))
    left_out = [one.heading for place, one in enumerate(columns) if place not in shown]
    if left_out:
        names = ", ".join(left_out).replace("\n", " ")
        caption += f"\nNot shown, for want of width: {names}; {more}."
    table = Table(title=title, caption=caption.strip(), caption_justify="left", show_lines=lines)
    number: Any = {"justify": "right", "no_wrap": True}
    for column in map(columns.__getitem__, shown):
        table.add_column(column.heading, **{"overflow": "fold"} if column.text else number)
    for row, style in zip(rows, styles or [None] * len(rows), strict=True):
        table.add_row(*(row[place] for place in shown), style=style)
    return table


def fitting(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Return the places of the columns that fit into ``width`` characters, each at its least
    width."""
    least = [_least(column, [row[place] for row in rows]) for place, column in enumerate(columns)]
    shown = list(range(len(columns)))
    while BORDER + sum(least[place] + PADDING for place in shown) > width:
        drop = max(columns[place].drop for place in shown)
        if not drop:
            break
        shown = [place for place in shown if columns[place].drop < drop]
    return shown


def _least(column: Column, cells: Sequence[str]) -> int:
    lines = "\n".join((column.heading, *cells)).split("\n")
    longest = max(map(len, lines))
    return min(longest, column.least) if column.text else longest
