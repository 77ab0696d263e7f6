"""Time one exchange of a model's gradients: by stock Horovod, and by schemes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvd_adaptive.tools.launch import Ranks, RanksError, run_ranks

DEFAULTS = (
    "float32",
    "float16",
    "ALQ(bits=3)",
    "ALQ(bits=3, exchange='scatter_reduce')",
    "ECDQ(bits=2)",
)


@dataclass(frozen=True)
class Measured:
    """Seconds of an exchange on the slowest rank: median and quartiles over steps.

    For schemes also what a rank sends, the relative squared error, and where the time goes.
    """

    method: str
    seconds: float
    quartiles: tuple[float, float]
    wire_bytes: float | None = None
    relative_error: float | None = None
    encode_s: float | None = None
    exchange_s: float | None = None
    decode_s: float | None = None


def measure(
    methods: Sequence[str], tensors: int, coordinates: int, steps: int, ranks: Ranks, seconds: float
) -> tuple[list[Measured], dict[str, int]]:
    """Measure methods, as ``tools.methods`` reads them, on ranks.

    Returns:
        Each method's figures, and {"ranks", "hosts"} as Horovod counts them.

    Raises:
        RanksError: as ``run_ranks``.
    """
    plan = {
        "tensors": tensors,
        "coordinates": coordinates,
        "steps": steps,
        "methods": list(methods),
    }
    results = run_ranks("hvd_adaptive.tools.bench.worker", plan, ranks, seconds)
    if len(results) != 1:
        raise RanksError(f"{len(results)} ranks sent figures, not the first rank alone")
    (figures,) = results
    where = figures.pop("")
    return [_measured(label, of_method) for label, of_method in figures.items()], where


def _measured(label: str, figures: dict[str, Any]) -> Measured:
    seconds = figures.pop("seconds")
    first, median, third = statistics.quantiles(seconds * 2, n=4, method="inclusive")
    names = Measured.__dataclass_fields__
    more = {name: value for name, value in figures.items() if name in names}
    return Measured(label, median, (first, third), **more)
