"""Checks of a monitor's arguments: errors name the argument, the value and what is allowed."""

from __future__ import annotations

import numbers
import re
from collections.abc import Collection
from typing import Any

from hvd_adaptive.settings import check_integer


def checked_steps(name: str, value: Any) -> int:
    """An integer of 1 or more."""
    return check_integer(name, value, 1)


def checked_limit(name: str, value: Any) -> float | None:
    """A number of 0 or more, or None."""
    if value is None:
        return None
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not 0 <= value < float("inf"):
        raise ValueError(f"{name}={value!r}: must be a number of 0 or more, or None")
    return float(value)


def checked_ranks(value: Any) -> frozenset[int] | str:
    """A set of ranks, or "all"."""
    if value == "all" and isinstance(value, str):
        return value
    if isinstance(value, str) or not isinstance(value, Collection):
        raise ValueError(f"ranks={value!r}: must be a collection of ranks, or 'all'")
    return frozenset(check_integer("ranks: rank", rank, 0) for rank in value)


def checked_name(value: Any) -> str:
    """What a file's name can begin with."""
    if not isinstance(value, str) or not re.fullmatch(r"\w[\w.-]*", value):
        raise ValueError(
            f"name={value!r}: must be of letters, digits, '_', '-' and '.', to begin a file's name"
        )
    return value


def checked_writer(value: Any) -> Any:
    """Something with ``add_scalar``, or None."""
    if value is not None and not callable(getattr(value, "add_scalar", None)):
        raise ValueError(
            f"tensorboard={value!r}: must be a torch.utils.tensorboard.SummaryWriter, or None"
        )
    return value
