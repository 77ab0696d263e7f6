"""Summarise a log: means over a run, and the cost of each parameter."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hvd_adaptive.monitor.log import Log

TIMES = ("encode_s", "exchange_s", "decode_s")


@dataclass(frozen=True)
class Stock:
    """Seconds of the same step without compression; see Monitor's ``compare``.

    Attributes:
        exchange_s: Seconds of one exchange alone, measured when the run began.
        least_s: Least seconds of a step, estimated; None if the run's step is unknown.
        most_s: Most seconds of a step, estimated; None if the run's step is unknown.
    """

    name: str
    exchange_s: float
    least_s: float | None
    most_s: float | None


@dataclass(frozen=True)
class Summary:
    """Means per step over the whole run, weighted by the steps of each record.

    Attributes:
        ring_bytes: Bytes that a rank would send in float32 by a ring, 2 (N - 1) / N of the
            gradient.
        step_s: Seconds from one step's end to the next one's; None if unknown.
        blocked_s: Those of them that the training's thread spent in this package; None if unknown.
        stock: Steps without compression, if the monitor compared.
        timed: step_s and blocked_s of the steps since ranks last changed, from which ``stock`` is
            estimated, and arrival_s, seconds from a step's first gradient to its last.
        relative_error: None if nothing was quantised.
    """

    steps: int
    ranks: int
    coordinates: float
    wire_bytes: float
    payload_bytes: float
    uncompressed_bytes: float
    ring_bytes: float
    relative_error: float | None
    encode_s: float
    exchange_s: float
    decode_s: float
    step_s: float | None
    peak_bytes: int
    non_finite: int
    blocked_s: float | None
    stock: tuple[Stock, ...]
    timed: Mapping[str, float | None]


@dataclass(frozen=True)
class Cost:
    """Cost of a parameter per step.

    A group's payload bytes are divided among its parameters. Bytes of full-precision coordinates
    belong to their parameters; everything else is divided by coordinates.

    Attributes:
        exchange: That of the group with most of the parameter's coordinates.
        groups: Numbers of the groups in which the parameter is.
    """

    name: str
    coordinates: int
    bits: float
    payload_bytes: float
    exchange: str
    groups: tuple[int, ...]


def summarise(log: Log) -> Summary:
    """Return the means over all steps."""
    last = log.starts[-1]
    compared = next((start for start in reversed(log.starts) if start.get("stock")), None)
    timed = _timed(log, compared)
    ranks, coordinates = last["ranks"], mean(log.steps, "coordinates") or 0.0
    return Summary(
        steps=sum(record["steps"] for record in log.steps),
        ranks=ranks,
        coordinates=coordinates,
        ring_bytes=2 * (ranks - 1) / ranks * 4 * coordinates,
        relative_error=mean(log.steps, "relative_error"),
        step_s=mean(log.steps, "step_s"),
        peak_bytes=max(record["peak_bytes"] for record in log.steps),
        non_finite=sum(record["non_finite"] for record in log.steps),
        blocked_s=mean(log.steps, "blocked_s"),
        stock=() if compared is None else tuple(_stock(compared["stock"], timed)),
        timed=timed,
        **{
            name: mean(log.steps, name) or 0.0
            for name in ("wire_bytes", "payload_bytes", "uncompressed_bytes", *TIMES)
        },
    )


def _timed(log: Log, compared: dict[str, Any] | None) -> dict[str, float | None]:
    """Return means of the timed steps since the start ``compared``."""
    since = float("inf") if compared is None else compared["time"]
    steps = [r for r in log.steps if r["time"] >= since and r["step_s"] is not None]
    return {name: mean(steps, name) for name in ("step_s", "blocked_s", "arrival_s")}


def _stock(seconds: Mapping[str, float], timed: Mapping[str, float | None]) -> Iterator[Stock]:
    """Estimate steps without compression from the seconds of each stock exchange."""
    step_s, blocked_s, arrival_s = timed.values()
    for name, exchange_s in seconds.items():
        least_s = most_s = None
        if step_s is not None and blocked_s is not None and arrival_s is not None:
            rest_s = max(0.0, step_s - blocked_s)
            least_s, most_s = rest_s + max(0.0, exchange_s - arrival_s), rest_s + exchange_s
        yield Stock(name, exchange_s, least_s, most_s)


def verdict(step_s: float | None, stock: Sequence[Stock]) -> str:
    """Say in a line whether the run's steps are shorter than those of the fastest stock exchange.

    It is yes below the lower estimate, no above the upper one, and unclear in between.
    """
    fastest = min(stock, key=lambda one: one.exchange_s, default=None)
    if step_s is None or fastest is None or fastest.least_s is None or fastest.most_s is None:
        return "Unknown: the run has no time of a step."
    times = step_s, fastest.least_s, fastest.most_s
    took, least, most = (f"{1e3 * seconds:.3g}" for seconds in times)
    answer, takes = "Unclear", f"{least} to {most}"
    if step_s < fastest.least_s:
        answer, takes = "Yes", f"at least {least}"
    elif step_s > fastest.most_s:
        answer, takes = "No", f"at most {most}"
    return f"{answer}: a step took {took} ms; stock {fastest.name} takes {takes} ms."


def mean(records: Sequence[dict[str, Any]], name: str) -> float | None:
    """Return the mean over steps of the records that have the figure; None if none has it."""
    known = [(r[name], r.get("steps", 1)) for r in records if r.get(name) is not None]
    steps = sum(count for _, count in known)
    return sum(value * count for value, count in known) / steps if steps else None


def group_means(log: Log) -> list[dict[str, Any]]:
    """Return the facts of the last layout's groups, and means of their figures since it began."""
    start = log.starts[-1]
    records = [r for r in log.steps if r["time"] >= start["time"]] or log.steps[-1:]
    rows = []
    for facts in start["groups"]:
        own = [
            group | {"steps": record["steps"]}
            for record in records
            for group in record["groups"]
            if group["group"] == facts["group"]
        ]
        names = ("payload_bytes", "wire_bytes", "relative_error", "flight_s", *TIMES)
        rows.append(facts | {name: mean(own, name) for name in names})
    return rows


def costs(log: Log) -> list[Cost]:
    """Return the cost of every parameter, sorted by payload bytes in descending order."""
    # Of each group of a parameter: coordinates, bytes, exchange, number.
    found: dict[str, list[tuple[int, float, str, int]]] = {}
    for group in group_means(log):
        if group["payload_bytes"] is None:  # none of its members had a gradient
            continue
        size = {"float64": 8, "float32": 4}.get(group["dtype"], 2)
        quantized, coordinates = group["quantized"], max(1, group["coordinates"])
        full_bytes = size * (group["coordinates"] - quantized)
        rest = max(0.0, group["payload_bytes"] - full_bytes)
        for name, own, full in group["members"]:
            # A group none of whose coordinates is quantised may travel rounded to bfloat16.
            sent = group["payload_bytes"] * (own + full) / coordinates
            if quantized:
                sent = size * full + rest * own / quantized
            part = own + full, sent, group["exchange"], group["group"]
            found.setdefault(name, []).append(part)
    rows = []
    for name, parts in found.items():
        numbers, sent, _, groups = zip(*parts, strict=True)
        total, bits = sum(numbers), 8 * sum(sent) / max(1, sum(numbers))
        rows.append(Cost(name, total, bits, sum(sent), max(parts)[2], groups))
    return sorted(rows, key=lambda row: (-row.payload_bytes, row.name))


def describe(log: Log) -> dict[str, Any]:
    """Return the whole summary for machines, as printed by ``hvd-adaptive report --json``."""
    start, summary = log.starts[-1], summarise(log)
    scheme, settings = parse_scheme(start["scheme"])
    facts = {name: start[name] for name in ("ranks", "rank", "host", "version", "torch")}
    return {
        "label": log.label,
        "scheme": scheme,
        "settings": settings,
        **facts,
        **asdict(summary),
        "helped": verdict(summary.timed["step_s"], summary.stock) if summary.stock else None,
        "tables": len(log.tables),
        "warnings": [warning["text"] for warning in log.warnings],
        "parameters": [asdict(row) for row in costs(log)],
        "groups": group_means(log),
    }


def parse_scheme(text: str) -> tuple[str, dict[str, Any]]:
    """Return a scheme's name and settings from its ``repr``; unreadable text becomes the name."""
    try:
        call = ast.parse(text, mode="eval").body
    except SyntaxError:
        return text, {}
    if not isinstance(call, ast.Call):
        return text, {}
    settings: dict[str, Any] = {}
    for word in call.keywords:
        text = settings[str(word.arg)] = ast.unparse(word.value)
        with contextlib.suppress(ValueError):  # not a literal
            settings[str(word.arg)] = ast.literal_eval(text)
    return ast.unparse(call.func), settings
