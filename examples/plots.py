"""The picture of mnist.py --demo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

COLOURS = ("#555555", "#d1762b", "#1f6fb4")
MARKERS = ("s", "^", "o")
PLAIN = FuncFormatter(lambda value, _: f"{value:g}")


def draw(methods: list[Any], path: Path) -> None:
    """Accuracy against bytes sent by a rank, and the level table over time, as a PNG."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    accuracy(left, methods)
    levels(right, methods)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def accuracy(axes: Axes, methods: list[Any]) -> None:
    """Test accuracy in the course of training."""
    for method, colour, marker in zip(methods, COLOURS, MARKERS, strict=False):
        run = method.runs[0]
        sent = [point["wire_bytes"] / 1e6 for point in run["curve"]]
        values = [100 * point["accuracy"] for point in run["curve"]]
        axes.plot(sent, values, color=colour, marker=marker, markersize=4, label=method.label)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(PLAIN)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("MB sent by each rank since the start")
    axes.set_ylabel("test accuracy, %")
    axes.set_title("Accuracy against bytes sent")
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(loc="lower right", frameon=True)


def levels(axes: Axes, methods: list[Any]) -> None:
    """Magnitudes of the last method that has a level table, version by version."""
    adaptive = [method for method in methods if method.runs[0]["tables"]]
    if not adaptive:
        axes.text(0.5, 0.5, "no method with a level table", ha="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    tables = adaptive[-1].runs[0]["tables"]
    places = range(len(tables))
    magnitudes = [[level for level in table["levels"] if level > 0] for table in tables]
    for line in zip(*magnitudes, strict=True):
        axes.plot(places, line, color=COLOURS[2], marker="o", markersize=4)
    # Numbers at the line's end tell what a log scale is hard to read for.
    if len(magnitudes[-1]) <= 8:
        for value in magnitudes[-1]:
            axes.annotate(
                f"{value:.3g}",
                (places[-1], value),
                xytext=(7, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
            )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(PLAIN)
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(top=1.5)
    axes.set_xlim(-0.4, len(tables) - 0.3)  # room for "unfitted" and the numbers
    axes.set_xticks(places, ["unfitted" if t["step"] is None else str(t["step"]) for t in tables])
    axes.set_xlabel("table fitted at step")
    axes.set_ylabel("magnitude, of the bucket's norm")
    axes.set_title(f"{adaptive[-1].label}: the levels ±l over time")
    axes.grid(True, which="major", alpha=0.25)
