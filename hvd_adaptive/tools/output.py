"""Print a table for people, or JSON for machines."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import Any

from rich.console import Console

WIDTH = 130
OK, PROBLEM, USAGE = 0, 1, 2


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


def print_failure(error: Exception, hints: Sequence[str], lines: int = 15) -> None:
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
    print(json.dumps(_plain(data), indent=1))


def whole(least: int) -> Any:
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


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value
