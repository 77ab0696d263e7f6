"""How commands print: a table for people, or JSON for machines."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console

WIDTH = 130
OK, PROBLEM, USAGE = 0, 1, 2


def console() -> Console:
    """Standard output; wide where it is no terminal."""
    own = Console(highlight=False)
    return own if own.is_terminal else Console(width=WIDTH, highlight=False)


def errors() -> Console:
    """Standard error: what is not the result."""
    return Console(stderr=True, soft_wrap=True, highlight=False)


def tell_error(text: str) -> None:
    """In red, to standard error."""
    errors().print(f"error: {text}", style="red", markup=False)


def print_json(data: Any) -> None:
    """On standard output; NaN and infinity, which JSON has not, as null."""
    print(json.dumps(_plain(data), indent=1))


def whole(least: int) -> Any:
    """A parser of integers from ``least`` on; "_" and "," may part digits."""

    def parse(text: str) -> int:
        digits = text.replace("_", "").replace(",", "")
        if not digits.isdecimal() or int(digits) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: must be an integer of {least} or more")
        return int(digits)

    return parse


def positive(text: str) -> float:
    """A parser of numbers above 0."""
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
