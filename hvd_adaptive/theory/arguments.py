"""Check arguments; a ValueError names the argument, its value and the allowed range."""

from __future__ import annotations

import math
from typing import Any

from hvd_adaptive.base.checks import is_real


def check_count(name: str, value: Any) -> int:
    """Return ``value`` as an int >= 1 (whole floats are allowed)."""
    if not (is_real(value) and math.isfinite(value) and value == int(value) and value >= 1):
        raise ValueError(f"{name}={value!r}: must be a whole number >= 1")
    return int(value)


def check_positive(name: str, value: Any, below: float = math.inf) -> float:
    """Return ``value`` as a float in (0, below)."""
    return _checked(name, value, is_real(value) and value > 0, "above 0", below)


def check_not_negative(name: str, value: Any, below: float = math.inf) -> float:
    """Return ``value`` as a float in [0, below)."""
    return _checked(name, value, is_real(value) and value >= 0, ">= 0", below)


def _checked(name: str, value: Any, is_enough: bool, allowed: str, below: float) -> float:
    if not is_enough or not value < below:
        limit = "" if below == math.inf else f" and below {below}"
        raise ValueError(f"{name}={value!r}: must be a finite number {allowed}{limit}")
    return float(value)


def check_order(value: Any) -> float:
    """Return the order q of an Lq norm, 1 <= q <= inf."""
    if not (is_real(value) and value >= 1):
        raise ValueError(f"norm_order={value!r}: must be a number >= 1, infinity included")
    return float(value)
