"""Check a monitor's arguments; errors name the argument, its value and the allowed range."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from hvd_adaptive.base.checks import check_integer, is_real


def checked_limit(name: str, value: Any) -> float | None:
    """Return a number >= 0, or None; raise ValueError otherwise."""
    if value is None:
        return None
    if not is_real(value) or not 0 <= value < float("inf"):
        raise ValueError(f"{name}={value!r}: must be a number of 0 or more, or None")
    return float(value)


def checked_ranks(value: Any) -> frozenset[int] | str:
    """Return a set of ranks, or "all"; raise ValueError otherwise."""
    if value == "all" and isinstance(value, str):
        return value
    if isinstance(value, str) or not isinstance(value, Collection):
        raise ValueError(f"ranks={value!r}: must be a collection of ranks, or 'all'")
    return frozenset(check_integer("ranks: rank", rank, 0) for rank in value)


def checked_name(value: Any) -> str:
    """Return a string that can begin a file name; raise ValueError otherwise."""
    if not isinstance(value, str) or not re.fullmatch(r"\w[\w.-]*", value):
        raise ValueError(
            f"name={value!r}: must begin a file name: letters, digits, '_', '-' and '.' only"
        )
    return value


def checked_sinks(name: str, value: Any) -> list[Any]:
    """Return a list of objects that can be written to; raise ValueError otherwise."""
    if isinstance(value, str) or not isinstance(value, Collection):
        raise ValueError(f"{name}={value!r}: must be a collection of sinks")
    for sink in value:
        lacks = [m for m in ("write", "flush", "close") if not callable(getattr(sink, m, None))]
        if lacks or isinstance(sink, type):
            called = ", ".join(f"{m}()" for m in lacks) or "an instance, not a class"
            raise ValueError(f"{name}: {sink!r}: must have {called}")
    return list(value)
