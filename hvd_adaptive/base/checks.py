"""Check keyword values; every error names the argument, its value and what is allowed."""

from __future__ import annotations

import gc
import numbers
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any


def is_real(value: Any) -> bool:
    """Return whether ``value`` is a real number and no bool; NaN and infinity are real."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    """Return whether ``value`` is an integer and no bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Return ``value`` as an int in [least, most]; raise ValueError if it is not one."""
    allowed = f">= {least}" if most is None else f"from {least} to {most}"
    if not is_whole(value) or value < least or (most is not None and value > most):
        raise ValueError(f"{name}={value!r}: must be an integer {allowed}")
    return int(value)


def check_optional_integer(name: str, value: Any, least: int) -> int | None:
    """Return ``check_integer`` of ``value``, or None for None."""
    return None if value is None else check_integer(name, value, least)


def check_choice(name: str, value: Any, allowed: Collection[str]) -> str:
    """Return ``value`` if it is one of ``allowed``; raise ValueError otherwise."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, allowed))}")
    return value


def check_flag(name: str, value: Any) -> bool:
    """Return ``value`` if it is a bool; raise ValueError otherwise."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: must be True or False")
    return value


def check_number(
    name: str, value: Any, allowed: str, is_allowed: Callable[[float], bool]
) -> float | None:
    """Return ``value`` as a float, or None for None; raise ValueError unless it is ``allowed``."""
    if value is None:
        return None
    if not is_real(value) or not is_allowed(value):
        raise ValueError(f"{name}={value!r}: must be {allowed}, or None")
    return float(value)


def check_has(name: str, value: Any, method: str, allowed: str) -> Any:
    """Return ``value`` if it is None or has ``method``; raise ValueError otherwise."""
    if value is not None and not callable(getattr(value, method, None)):
        raise ValueError(f"{name}={value!r}: must be {allowed}, or None")
    return value


def check_parameter_bits(name: str, value: Any) -> dict[str, int | None] | None:
    """Return a plain copy in the same order, or None if it is empty; raise ValueError unless
    ``value`` maps strings to integers >= 1 and None.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{name}={value!r}: must be a mapping of name patterns to bits or None")
    checked = {}
    for pattern, bits in value.items():
        if bits is not None and not (is_whole(bits) and bits >= 1):
            raise ValueError(
                f"{name}[{pattern!r}]={bits!r}: must be an integer >= 1, or None for full precision"
            )
        checked[str(pattern)] = None if bits is None else int(bits)
    return checked or None


def check_named_parameters(name: str, value: Any) -> list[tuple[str, Any]] | None:
    """Return a list of (name, parameter) pairs, or None; raise ValueError for other contents."""
    if value is None:
        return None
    if not hasattr(value, "__iter__"):
        kind = type(value).__name__
        raise ValueError(
            f"{name}: must hold (name, parameter) pairs, not be a {kind}: give "
            "model.named_parameters()"
        )
    pairs = list(value)
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise ValueError(
                f"{name}: must hold (name, parameter) pairs as model.named_parameters() gives "
                f"them, not {type(pair).__name__}"
            )
    return pairs


def living(kind: type) -> Iterator[Any]:
    """Yield all objects of a class in this process, one of which an argument should have named.

    This takes about 50 ms in a process with torch. ``isinstance`` would wake lazy proxies.
    """
    return (each for each in gc.get_objects() if issubclass(type(each), kind))
