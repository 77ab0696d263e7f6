"""Make tables for narrow terminals, which drop columns instead of squeezing them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

BORDER, PADDING = 1, 3  # characters: of a table's left edge, and of each column's edge and spaces
LEAST_TEXT = 24  # characters of a column of text, unless its cells are shorter


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
    """Return a table that fits into ``width`` characters.

    Args:
        columns: its columns.
        rows: a cell for each column.
        width: of the terminal, in characters.
        title: text above the table.
        caption: text below it. What the shown columns hold, and the names of columns that do not
            fit, are added.
        styles: of the rows; none if empty.
        lines: whether lines separate the rows.
        more: how to see the columns that do not fit, for the caption.

    Raises:
        ValueError: a row does not have a cell for each column.
    """
    from rich.table import Table

    if any(len(row) != len(columns) for row in rows):
        raise ValueError(f"rows: each must have {len(columns)} cells, one for each column")
    shown = fitting(columns, rows, width)
    caption = "; ".join(filter(None, [caption, *(columns[place].about for place in shown)]))
    left_out = [one for place, one in enumerate(columns) if place not in shown]
    if left_out:
        names = ", ".join(one.heading.replace("\n", " ") for one in left_out)
        missing = f"Not shown, for want of width: {names}; {more}."
        caption = f"{caption}\n{missing}".strip()
    table = Table(
        title=title or None,
        caption=caption or None,
        caption_justify="left",
        show_lines=lines,
    )
    for column in map(columns.__getitem__, shown):
        if column.text:
            table.add_column(column.heading, overflow="fold")
        else:
            table.add_column(column.heading, justify="right", no_wrap=True)
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
    lines = [line for cell in (column.heading, *cells) for line in cell.split("\n")]
    longest = max(map(len, lines))
    return min(longest, column.least) if column.text else longest
