"""Summarise a log: means over a run, and the cost of each parameter."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from hvd_adaptive.monitor.log import Log
from hvd_adaptive.monitor.meter import SECONDS


def describe(log: Log) -> dict[str, Any]:
    """Return what ``hvd-adaptive report --json`` prints, and the page shows.

    Figures are means per step over the whole run, weighted by the steps of each record; None if
    they are unknown. Besides those of the records there are:

    - ``ring_bytes``: bytes that a rank would send in float32 by a ring, 2 (N - 1) / N of the
      gradient.
    - ``timed``: step_s, blocked_s and arrival_s of the steps since ranks last changed.
    - ``stock``: steps without compression (``stock_steps``), if the monitor compared.
    - ``helped``: ``verdict`` about them.
    - ``parameters``, ``groups``: ``costs`` and ``group_means``.
    """
    start, steps = log.starts[-1], log.steps
    scheme, settings = parse_scheme(start["scheme"])
    facts = {name: start[name] for name in ("ranks", "rank", "host", "version", "torch")}
    amounts = ("coordinates", "wire_bytes", "payload_bytes", "uncompressed_bytes", *SECONDS)
    means: dict[str, Any] = {name: mean(steps, name) or 0.0 for name in amounts}
    means |= {name: mean(steps, name) for name in ("relative_error", "step_s", "blocked_s")}
    compared = next((start for start in reversed(log.starts) if start.get("stock")), None)
    since = float("inf") if compared is None else compared["time"]
    recent = [r for r in steps if r["time"] >= since and r["step_s"] is not None]
    timed = {name: mean(recent, name) for name in ("step_s", "blocked_s", "arrival_s")}
    stock = [] if compared is None else stock_steps(compared["stock"], timed)
    return {
        "label": log.label,
        "scheme": scheme,
        "settings": settings,
        **facts,
        **means,
        "steps": sum(record["steps"] for record in steps),
        "ring_bytes": 2 * (start["ranks"] - 1) / start["ranks"] * 4 * means["coordinates"],
        "peak_bytes": max(record["peak_bytes"] for record in steps),
        "non_finite": sum(record["non_finite"] for record in steps),
        "timed": timed,
        "stock": stock,
        "helped": verdict(timed["step_s"], stock) if stock else None,
        "tables": len(log.tables),
        "warnings": [warning["text"] for warning in log.warnings],
        "parameters": costs(log),
        "groups": group_means(log),
    }


def stock_steps(
    seconds: Mapping[str, float], timed: Mapping[str, float | None]
) -> list[dict[str, Any]]:
    """Estimate steps without compression from the seconds of each stock exchange.

    Returns:
        Rows with name, exchange_s (seconds of one exchange alone), and least_s and most_s (of a
        step; None if the run's step is unknown). See Monitor's ``compare``.
    """
    step_s, blocked_s, arrival_s = timed["step_s"], timed["blocked_s"], timed["arrival_s"]
    rows = []
    for name, exchange_s in seconds.items():
        least_s = most_s = None
        if step_s is not None and blocked_s is not None and arrival_s is not None:
            rest_s = max(0.0, step_s - blocked_s)
            least_s, most_s = rest_s + max(0.0, exchange_s - arrival_s), rest_s + exchange_s
        row = {"name": name, "exchange_s": exchange_s, "least_s": least_s, "most_s": most_s}
        rows.append(row)
    return rows


def verdict(step_s: float | None, stock: Sequence[Mapping[str, Any]]) -> str:
    """Say in a line whether the run's steps are shorter than those of the fastest stock exchange.

    It is yes below the lower estimate, no above the upper one, and unclear in between.
    """
    fastest = min(stock, key=lambda one: one["exchange_s"])
    if step_s is None or fastest["least_s"] is None:
        return "Unknown: the run has no time of a step."
    times = step_s, fastest["least_s"], fastest["most_s"]
    took, least, most = (f"{1e3 * seconds:.3g}" for seconds in times)
    answer, takes = "Unclear", f"{least} to {most}"
    if step_s < fastest["least_s"]:
        answer, takes = "Yes", f"at least {least}"
    elif step_s > fastest["most_s"]:
        answer, takes = "No", f"at most {most}"
    return f"{answer}: a step took {took} ms; stock {fastest['name']} takes {takes} ms."


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
        names = ("payload_bytes", "wire_bytes", "relative_error", "flight_s", *SECONDS)
        rows.append(facts | {name: mean(own, name) for name in names})
    return rows


def costs(log: Log) -> list[dict[str, Any]]:
    """Return the cost of every parameter per step, sorted by payload bytes in descending order.

    A group's payload bytes are divided among its parameters. Bytes of full-precision coordinates
    belong to their parameters; everything else is divided by coordinates.

    Returns:
        Rows with name, coordinates, bits (of a coordinate), payload_bytes, exchange (that of the
        group with most of the parameter's coordinates) and groups (their numbers).
    """
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
        row = {"name": name, "coordinates": sum(numbers), "payload_bytes": sum(sent)}
        row["bits"] = 8 * sum(sent) / max(1, sum(numbers))
        rows.append(row | {"exchange": max(parts)[2], "groups": groups})
    return sorted(rows, key=lambda row: (-row["payload_bytes"], row["name"]))


def parse_scheme(text: str) -> tuple[str, dict[str, Any]]:
    """Return a scheme's name and settings from its ``repr``; unreadable text becomes the name."""
    try:
        call = ast.parse(text, mode="eval").body
    except SyntaxError:
        call = None
    if not isinstance(call, ast.Call):
        return text, {}
    settings: dict[str, Any] = {}
    for word in call.keywords:
        text = settings[str(word.arg)] = ast.unparse(word.value)
        with contextlib.suppress(ValueError):  # not a literal
            settings[str(word.arg)] = ast.literal_eval(text)
    return ast.unparse(call.func), settings
