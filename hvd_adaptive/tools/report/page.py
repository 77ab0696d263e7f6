"""Write the report's page: HTML that needs nothing besides itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jinja2

from hvd_adaptive.monitor.log import Log
from hvd_adaptive.tools.output import seconds
from hvd_adaptive.tools.report import figures, summary

MOST_ROWS = 40
MOST_PARTS = 6


def page(logs: Sequence[Log], title: str) -> str:
    """Return the whole page; ``title`` names the run."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hvd_adaptive.tools.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    filters = (size, seconds, figure, figures.share)
    environment.filters |= {one.__name__: one for one in filters}
    runs = [section(log) for log in logs]
    return environment.get_template("page.html").render(title=title, runs=runs)


def section(log: Log) -> dict[str, Any]:
    """Return the template's values for one compressor."""
    start, means, rows = log.starts[-1], summary.summarise(log), summary.costs(log)
    scheme, settings = summary.parse_scheme(start["scheme"])
    parts = list(dict.fromkeys(table["part"] for table in log.tables))
    return {
        "log": log,
        "start": start,
        "begun": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(log.starts[0]["time"])),
        "scheme": scheme,
        "settings": settings,
        "summary": means,
        "tiles": tiles(means),
        "verdict": summary.verdict(means.timed["step_s"], means.stock),
        "bytes": figures.bytes_figure(log, means),
        "errors": figures.error_figure(log),
        "levels": [(part, figures.levels_figure(log, part)) for part in parts[:MOST_PARTS]],
        "more_parts": max(0, len(parts) - MOST_PARTS),
        "times": figures.time_figure(log),
        "costs_figure": figures.costs_figure(rows),
        "costs_narrow": figures.costs_figure(rows, wide=False),
        "costs": rows[:MOST_ROWS],
        "more_costs": len(rows[MOST_ROWS:]),
        "total": sum(row.payload_bytes for row in rows),
        "groups": summary.group_means(log),
    }


def tiles(s: summary.Summary) -> list[tuple[str, str, str]]:
    """Return (figure, what it is, more about it) of the run."""
    spent = s.encode_s + s.exchange_s + s.decode_s
    ratio = f"{s.uncompressed_bytes / s.payload_bytes:.1f} x" if s.payload_bytes else "-"
    sizes = f"{size(s.uncompressed_bytes)} to {size(s.payload_bytes)}"
    part = "of a step" if s.step_s is None else f"{spent / s.step_s:.0%} of {seconds(s.step_s)}"
    shown = [
        (size(s.wire_bytes), "sent by a rank each step", _times(s.ring_bytes, s.wire_bytes)),
        (ratio, "gradients over payloads", sizes),
        (figure(s.relative_error), "relative squared error", "of all quantised coordinates"),
        (seconds(spent), "encode, wait and decode", part),
        (size(s.peak_bytes), "held beyond gradients", "at the highest"),
    ]
    if s.non_finite:
        shown.append((f"{s.non_finite:,}", "buckets not finite", "of all steps"))
    return shown


def size(value: float | None) -> str:
    """Format bytes, in powers of 1000."""
    if value is None:
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 999.5 or unit == "GB":
            break
        value /= 1000
    return f"{value:.0f} B" if unit == "B" else f"{value:.3g} {unit}"


def figure(value: float | None) -> str:
    """Format a number with three digits."""
    return "-" if value is None else f"{value:.3g}"


def _times(ring: float, sent: float) -> str:
    """Say how much less, or more, than float32 was sent."""
    if not ring or not sent:
        return "nothing to compare with"
    less = ring / sent
    text = f"{less:.1f} times less" if less >= 1 else f"{1 / less:.1f} times more"
    return f"{text} than float32 ({size(ring)})"
