"""The ALQ paper's figures, drawn from simulated runs."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from drawing import PLAIN, legend, show_legend
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from PIL import Image

from hvd_adaptive.simulate import Records, Result

# Okabe and Ito's colours, and blacks and greys for those without quantisation.
STYLES = {
    "SGD": ("#999999", ":"),
    "SuperSGD": ("#000000", "-"),
    "QSGD": ("#7b3fb5", "-."),
    "QSGDinf": ("#e69f00", "--"),
    "NUQSGD": ("#d62728", "--"),
    "TernGrad": ("#cc79a7", "--"),
    "ALQ": ("#0072b2", "-"),
    "ALQ-N": ("#56b4e9", "-"),
    "ALQG": ("#0072b2", "-."),
    "ALQG-N": ("#56b4e9", "-."),
    "AMQ": ("#009e73", "-"),
    "AMQ-N": ("#7fce9f", "-"),
}
Curves = Mapping[str, list[Result]]


def save(figure: Figure, path: Path) -> None:
    """As a PNG of 160 colours, half the size of one of all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=100)
    plt.close(figure)
    Image.open(drawn).convert("RGB").quantize(160).save(path, optimize=True)


def _panels(count: int, height: float = 3.9) -> tuple[Figure, list[Axes]]:
    figure, axes = plt.subplots(
        1, count, figsize=(4.6 * count, height), layout="constrained", squeeze=False
    )
    return figure, list(axes[0])


def _legend(figure: Figure, axes: Iterable[Axes]) -> None:
    """One legend for all panels, above them."""
    found = {}
    for each in axes:
        found |= dict(zip(*reversed(each.get_legend_handles_labels()), strict=True))
    ordered = {name: found[name] for name in STYLES if name in found} or found
    show_legend(figure, ordered, math.ceil(len(ordered) / 2))


def _style(method: str) -> dict[str, str]:
    colour, line = STYLES[method]
    return {"color": colour, "linestyle": line, "label": method}


def _log(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.grid(True, which="major", alpha=0.25)


def _mean(results: list[Result], column: str) -> tuple[list[int], np.ndarray]:
    """Steps with a value, and the mean over seeds; a run that diverged makes it NaN."""
    rows = [
        [(r["step"], r[column]) for r in result.rows if r[column] is not None] for result in results
    ]
    values = np.array([[value for _, value in row] for row in rows], dtype=float)
    return [step for step, _ in rows[0]], values.mean(axis=0)


def trajectory(records: Mapping[str, list[Records]], path: Path) -> None:
    """Fig. 5: variance on the trajectory of float32 SGD, one panel a task; mean of the seeds."""
    figure, panels = _panels(len(records))
    for axes, (title, of_seeds) in zip(panels, records.items(), strict=True):
        for method in STYLES:
            rows = [[r for r in record.rows if r["method"] == method] for record in of_seeds]
            if rows[0]:
                mean = np.mean([[r["estimator"] for r in each] for each in rows], axis=0)
                axes.plot(
                    [r["step"] for r in rows[0]], mean, marker=".", **_style(method), linewidth=1.4
                )
        _log(axes)
        axes.set_title(title)
        axes.set_xlabel("step of float32 SGD")
    panels[0].set_ylabel("variance of the averaged gradient,\nper coordinate")
    _legend(figure, panels)
    save(figure, path)


def training_variance(curves: Mapping[str, Curves], path: Path) -> None:
    """Fig. 4: variance in the course of each method's own training."""
    figure, panels = _panels(len(curves))
    for axes, (title, methods) in zip(panels, curves.items(), strict=True):
        for method, results in methods.items():
            steps, values = _mean(results, "minibatch" if method == "SGD" else "estimator")
            if np.isfinite(values).any():
                axes.plot(steps, values, **_style(method), linewidth=1.4)
        _log(axes)
        axes.set_title(title)
        axes.set_xlabel("step of the method's own training")
    panels[0].set_ylabel("variance of the averaged gradient,\nper coordinate")
    _legend(figure, panels)
    save(figure, path)


def normalized_variance(curves: Mapping[str, list[Result]], bucket_size: int, path: Path) -> None:
    """Fig. 1: variance of normalised gradient coordinates, one line a seed of SuperSGD.

    Times the bucket size it is the variance of a bucket divided by its norm: 1 where minibatches
    have nothing in common.
    """
    figure, panels = _panels(len(curves), height=3.2)
    for axes, (title, results) in zip(panels, curves.items(), strict=True):
        for seed, result in enumerate(results):
            steps, values = _mean([result], "normalized_minibatch")
            axes.plot(steps, bucket_size * values, marker=".", label=f"seed {seed}")
            drops = [
                r["step"]
                for before, r in zip(result.rows, result.rows[1:], strict=False)
                if r["learning_rate"] != before["learning_rate"]
            ]
        for drop in drops:
            axes.axvline(drop, color="#999999", linestyle=":", linewidth=1)
        axes.set_ylim(0, 1.15)
        axes.grid(True, alpha=0.25)
        axes.set_title(title)
        axes.set_xlabel("step (dotted: the rate is cut)")
    panels[0].set_ylabel("variance of normalised\ncoordinates x bucket size")
    panels[0].legend(fontsize=8, loc="lower right")
    save(figure, path)


def loss_and_accuracy(curves: Mapping[str, Curves], path: Path) -> None:
    """Fig. 3: validation loss, and accuracy, in the course of training."""
    figure, grid = plt.subplots(
        2, len(curves), figsize=(4.6 * len(curves), 6.4), layout="constrained", squeeze=False
    )
    for column, (title, methods) in enumerate(curves.items()):
        upper, lower = grid[0][column], grid[1][column]
        best = 0.0
        for method, results in methods.items():
            steps, loss = _mean(results, "validation_loss")
            _, accuracy = _mean(results, "validation_accuracy")
            upper.plot(steps, loss, **_style(method), linewidth=1.4)
            lower.plot(steps, 100 * accuracy, **_style(method), linewidth=1.4)
            best = max(best, 100 * float(accuracy.max()))
        _log(upper)
        upper.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        upper.yaxis.set_major_formatter(PLAIN)
        upper.yaxis.set_minor_formatter(NullFormatter())
        upper.set_ylim(top=3)
        lower.set_ylim(max(0, best - 12), best + 0.5)
        lower.grid(True, alpha=0.25)
        upper.set_title(title)
        lower.set_xlabel("step")
    grid[0][0].set_ylabel("validation loss")
    grid[1][0].set_ylabel("validation accuracy, %")
    _legend(figure, grid.flat)
    save(figure, path)


def final_levels(tables: Mapping[str, list[float]], title: str, path: Path) -> None:
    """Fig. 6: the signed levels of each method at the end; above linear, below by magnitude."""
    figure, panels = _panels(2, height=3.6)
    for place, (method, levels) in enumerate(tables.items()):
        colour = STYLES[method][0]
        panels[0].plot(levels, [place] * len(levels), "|", color=colour, markersize=13, mew=2)
        positive = [level for level in levels if level > 0]
        panels[1].plot(positive, [place] * len(positive), "|", color=colour, markersize=13, mew=2)
    for axes in panels:
        axes.set_yticks(range(len(tables)), tables)
        axes.invert_yaxis()
        axes.grid(True, axis="x", alpha=0.25)
    panels[0].set_xticks([-1, -0.5, 0, 0.5, 1])
    panels[0].set_xlabel("levels")
    panels[1].set_xscale("log")
    panels[1].xaxis.set_major_formatter(PLAIN)
    panels[1].set_xlabel("positive levels")
    figure.suptitle(title)
    save(figure, path)


def sweep(
    values: Mapping[str, Mapping[str, Mapping[int, tuple[float, float]]]],
    labels: Mapping[str, str],
    floor: float,
    path: Path,
) -> None:
    """Fig. 7, Table 2: accuracy, mean and standard error, against a setting; one panel a setting.

    values: {setting: {method: {value: (mean, error)}}}; what lies under ``floor`` is cut off.
    """
    figure, panels = _panels(len(values))
    for axes, (setting, methods) in zip(panels, values.items(), strict=True):
        for method, points in methods.items():
            x = sorted(points)
            mean, error = zip(*(points[value] for value in x), strict=True)
            axes.errorbar(x, mean, error, **_style(method), linewidth=1.3, capsize=2, marker=".")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({v for points in methods.values() for v in points}))
        axes.xaxis.set_major_formatter(PLAIN)
        axes.minorticks_off()
        axes.set_xlabel(labels[setting])
        axes.set_ylim(bottom=floor)
        axes.grid(True, alpha=0.25)
    panels[0].set_ylabel("validation accuracy, %")
    _legend(figure, panels)
    save(figure, path)


def fits(histories: Mapping[str, Mapping[str, np.ndarray]], path: Path) -> None:
    """Fig. 8: the objective during one update of the table, from several starts.

    histories: {objective: {"solver, start": values}}.
    """
    figure, panels = _panels(len(histories), height=4.4)
    colours = {"coordinate descent": "#0072b2", "gradient descent": "#d55e00", "AMQ": "#009e73"}
    lines = ("-", "--", ":")
    for axes, (title, curves) in zip(panels, histories.items(), strict=True):
        seen: dict[str, int] = {}
        for label, values in curves.items():
            solver = label.split(",")[0]
            line = lines[seen.get(solver, 0) % len(lines)]
            seen[solver] = seen.get(solver, 0) + 1
            axes.plot(
                1 + np.arange(len(values)),
                values,
                color=colours[solver],
                linestyle=line,
                label=label,
            )
        _log(axes)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(PLAIN)
        axes.set_title(title)
        axes.set_xlabel("1 + sweeps or steps")
    panels[0].set_ylabel("objective, per coordinate")
    legend(figure, panels[:1], 3)
    save(figure, path)
