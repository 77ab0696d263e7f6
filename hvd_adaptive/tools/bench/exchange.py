"""One exchange of a model's gradients: float32 and float16 by stock Horovod, and by schemes."""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvd_adaptive.tools.launch import Place, RanksError, run_ranks

STOCK = {"float32": "none", "float16": "fp16"}
DEFAULTS = (
    "float32",
    "float16",
    "ALQ(bits=3)",
    "ALQ(bits=3, exchange='scatter_reduce')",
    "ECDQ(bits=2)",
)


@dataclass(frozen=True)
class Measured:
    """Seconds of an exchange, of the slowest rank: median and quartiles over steps. Of schemes also
    what a rank sends, the relative squared error, and where the time goes; else None."""

    method: str
    seconds: float
    quartiles: tuple[float, float]
    wire_bytes: float | None = None
    relative_error: float | None = None
    encode_s: float | None = None
    exchange_s: float | None = None
    decode_s: float | None = None


def parse_method(text: str) -> tuple[str, str, dict[str, Any]]:
    """ "ALQ(bits=3)" -> (label, class name, keywords); ValueError where there is no such scheme, or
    it does not take these keywords."""
    import hvd_adaptive
    from hvd_adaptive.tools.schemes.catalog import scheme_classes

    if text in STOCK:
        return text, STOCK[text], {}
    known = scheme_classes()
    match = re.fullmatch(r"(\w+)(?:\((.*)\))?", text.strip())
    names = {name.lower(): name for name in known}
    if match is None or match[1].lower() not in names:
        raise ValueError(f"{text!r}: must be one of {', '.join([*STOCK, *known])}, with keywords")
    name = names[match[1].lower()]
    try:
        call = ast.parse(f"f({match[2] or ''})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("schemes take keywords alone")
        keywords = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        getattr(hvd_adaptive, name)(**keywords)
    except (SyntaxError, TypeError, ValueError) as error:
        raise ValueError(f"{text!r}: {error}") from error
    return text, name, keywords


def measure(
    methods: Sequence[str], tensors: int, coordinates: int, steps: int, place: Place, seconds: float
) -> tuple[list[Measured], dict[str, int]]:
    """Each method's figures, and {"ranks", "hosts"} as Horovod counts them; RanksError as
    ``run_ranks``."""
    plan = {
        "tensors": tensors,
        "coordinates": coordinates,
        "steps": steps,
        "methods": [parse_method(method) for method in methods],
    }
    told = run_ranks("hvd_adaptive.tools.bench.worker", plan, place, seconds)
    if len(told) != 1:
        raise RanksError(f"{len(told)} ranks told their figures, not the first one alone")
    figures = told[0]
    where = figures.pop("")
    return [_measured(label, of_method) for label, of_method in figures.items()], where


def _measured(label: str, figures: dict[str, Any]) -> Measured:
    seconds = figures.pop("seconds")
    first, median, third = statistics.quantiles(seconds * 2, n=4, method="inclusive")
    names = Measured.__dataclass_fields__
    more = {name: value for name, value in figures.items() if name in names}
    return Measured(label, median, (first, third), **more)
