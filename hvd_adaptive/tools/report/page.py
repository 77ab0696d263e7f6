"""Draw and write the report's page: HTML that needs nothing besides itself, with figures in SVG."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Sequence
from typing import Any, cast

import jinja2
import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from hvd_adaptive.monitor.log import Log
from hvd_adaptive.monitor.meter import SECONDS
from hvd_adaptive.tools.output import seconds
from hvd_adaptive.tools.report.summary import describe

# Encode, wait, decode, the rest: apart for the colour-blind, too.
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#e69f00", "#009e73", "#a9b0b8"
INK, FAINT = "#22272e", "#e6e8eb"
MOST_ROWS = 40
MOST_PARTS = 6
MOST_POINTS = 400
STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["system-ui", "Segoe UI", "Helvetica", "Arial", "DejaVu Sans"],
    "font.size": 11,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "legend.frameon": False,
}


def page(logs: Sequence[Log], title: str) -> str:
    """Return the whole page; ``title`` names the run."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hvd_adaptive.tools.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    filters = (size, seconds, figure, share)
    environment.filters |= {one.__name__: one for one in filters}
    with matplotlib.rc_context(STYLE):
        runs = [section(log) for log in logs]
    return environment.get_template("page.html").render(title=title, runs=runs)


def section(log: Log) -> dict[str, Any]:
    """Return the template's values for one compressor."""
    run = describe(log)
    parts = list(dict.fromkeys(table["part"] for table in log.tables))
    shown = parts[:MOST_PARTS]
    return run | {
        "begun": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(log.starts[0]["time"])),
        "starts": len(log.starts),
        "tiles": tiles(run),
        "bytes": bytes_figure(log, run["ring_bytes"]),
        "errors": error_figure(log),
        "levels": [(part, levels_figure(log, part, at)) for at, part in enumerate(shown)],
        "more_parts": len(parts) - len(shown),
        "times": time_figure(log),
        "costs": run["parameters"][:MOST_ROWS],
        "more_costs": len(run["parameters"][MOST_ROWS:]),
        "total": sum(row["payload_bytes"] for row in run["parameters"]),
    }


def tiles(run: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return (figure, what it is, more about it) of the run."""
    spent, step_s = sum(run[name] for name in SECONDS), run["step_s"]
    before, sent = run["uncompressed_bytes"], run["payload_bytes"]
    ratio = f"{before / sent:.1f} x" if sent else "-"
    part = "of a step" if step_s is None else f"{spent / step_s:.0%} of {seconds(step_s)}"
    less = _times(run["ring_bytes"], run["wire_bytes"])
    shown = [
        (size(run["wire_bytes"]), "sent by a rank each step", less),
        (ratio, "gradients over payloads", f"{size(before)} to {size(sent)}"),
        (figure(run["relative_error"]), "relative squared error", "of all quantised coordinates"),
        (seconds(spent), "encode, wait and decode", part),
        (size(run["peak_bytes"]), "held beyond gradients", "at the highest"),
    ]
    if run["non_finite"]:
        shown.append((f"{run['non_finite']:,}", "buckets not finite", "of all steps"))
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


def bytes_figure(log: Log, float32: float) -> str:
    """Draw what this rank sent in each step, beside a ring of float32."""
    axes = _axes()
    steps, sent = _series(log.steps, "wire_bytes")
    axes.plot(steps, sent, color=BLUE, drawstyle="steps-pre", label="sent by this rank")
    axes.axhline(float32, color=ORANGE, dashes=(5, 3), label="float32 over a ring")
    axes.set_ylim(0, 1.12 * max([float32, *sent]))
    axes.yaxis.set_major_formatter(EngFormatter("B"))
    _label(axes)
    return _svg("bytes", axes)


def error_figure(log: Log) -> str | None:
    """Draw the estimated relative squared error; None if nothing was quantised."""
    steps, errors = _series(log.steps, "relative_error")
    if not errors:
        return None
    axes = _axes()
    axes.plot(steps, errors, color=BLUE, label="relative squared error")
    fitted = [table for table in log.tables if table["part"] == "" and table["version"]]
    for at, table in enumerate(fitted):
        label = "level table refitted" if not at else None
        axes.axvline(table["step"], color=GREY, lw=1, dashes=(2, 2), label=label)
    if max(errors) > 20 * min(errors) > 0:
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.12 * max(errors))
    _label(axes)
    return _svg("error", axes)


def levels_figure(log: Log, part: str, number: int) -> str:
    """Draw the levels of a part, the one of this number, over time."""
    tables = [table for table in log.tables if table["part"] == part]
    ends = [table["step"] for table in tables[1:]] + [log.steps[-1]["step"] + 1]
    axes = _axes()
    least = min(abs(v) for table in tables for v in table["levels"] if v)
    for table, end in zip(tables, ends, strict=True):
        axes.hlines(table["levels"], table["step"], end, color=BLUE, lw=1.6)
    for table in tables[1:]:
        axes.axvline(table["step"], color=GREY, lw=1, dashes=(2, 2))
    axes.set_yscale("symlog", linthresh=least, linscale=0.5)
    axes.set_ylim(-1.3, 1.3)
    axes.yaxis.set_major_formatter(lambda value, at: f"{value:g}")
    decades = [10.0**-place for place in range(9) if 10.0**-place > 2 * least]
    axes.set_yticks([*decades, 0.0, *(-value for value in decades)])
    axes.minorticks_off()
    axes.set_xlabel("step")
    axes.set_ylabel("level / the bucket's norm")
    return _svg(f"levels {number}", axes)


def time_figure(log: Log) -> str:
    """Draw the seconds of a step: encoding, waiting, decoding, and the rest."""
    rows = [
        record | {"rest": max(0.0, (record["step_s"] or 0.0) - sum(record[n] for n in SECONDS))}
        for record in log.steps
    ]
    axes = _axes()
    steps, _ = _series(rows, "rest")
    parts = [_series(rows, name)[1] for name in (*SECONDS, "rest")]
    labels = ("encode", "wait", "decode", "the rest of the step")
    colours = (BLUE, ORANGE, GREEN, GREY)
    axes.stackplot(steps, parts, labels=labels, colors=colours, lw=0)
    totals = sorted(map(sum, zip(*parts, strict=True)))
    # A first step that compiles must not flatten all others.
    axes.set_ylim(0, 1.15 * totals[int(0.95 * (len(totals) - 1))])
    axes.yaxis.set_major_formatter(EngFormatter("s"))
    _label(axes, columns=4)
    return _svg("time", axes)


def _series(records: Sequence[dict[str, Any]], name: str) -> tuple[list[float], list[float]]:
    """Return steps and values where values are known, as means of neighbours if there are many."""
    known = [(float(r["step"]), float(r[name])) for r in records if r.get(name) is not None]
    width = -(-len(known) // MOST_POINTS) or 1
    chunks = [known[at : at + width] for at in range(0, len(known), width)]
    steps = [chunk[-1][0] for chunk in chunks]
    return steps, [sum(value for _, value in chunk) / len(chunk) for chunk in chunks]


def _label(axes: Axes, columns: int = 2) -> None:
    """Name the axis of steps, and add a legend."""
    axes.set_xlabel("step")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, borderaxespad=0.1)


def share(part: float, total: float) -> str:
    """Return a part as a percentage."""
    percent = 100 * part / total if total else 0.0
    return f"{percent:.1f} %" if percent >= 0.05 or not percent else "< 0.1 %"


def _axes() -> Axes:
    return Figure(figsize=(7.2, 2.6), layout="constrained").add_subplot()


def _svg(label: str, axes: Axes) -> str:
    """Return an <svg> element as wide as its place. ``label`` makes its ids unique in the page."""
    file, figure = io.StringIO(), cast(Figure, axes.figure)
    with matplotlib.rc_context({"svg.hashsalt": label}):
        metadata = {"Date": None, "Creator": None}
        figure.savefig(file, format="svg", metadata=metadata, transparent=True)
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    # The page's colours, which depend on the reader's choice of a light or a dark ground.
    svg = svg.replace(INK, "var(--ink)").replace(FAINT, "var(--line)")
    found = re.match(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', svg)
    if found is None:
        raise ValueError("matplotlib drew an SVG without a viewBox")
    return f'<svg viewBox="{found[1]}" role="img" aria-label="{label}">{svg[found.end() :]}'
