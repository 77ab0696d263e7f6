"""The figures of qcs_paper.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from drawing import PLAIN, legend, save
from matplotlib.figure import Figure
from qcs_regression import CONVERGED
from qcs_variance import FIG4

# Okabe and Ito's colours; the alternatives to a method share its colour.
STYLES = {
    "baseline": ("#000000", "-"),
    "QSGD": ("#d62728", "--"),
    "QSGD L∞": ("#e69f00", "--"),
    "QSGD L∞, one bucket": ("#e69f00", "--"),
    "Sparse SGD": ("#009e73", "-."),
    "Sparse SGD, one bucket": ("#7fce9f", "-."),
    "QCS": ("#0072b2", "-"),
    "QCS, n = 320": ("#00264d", "-"),
    "QCS, 40% fewer bits": ("#56b4e9", "-"),
    "QSGD, Eq. 11": ("#d62728", ":"),
    "QCS, Eq. 11": ("#0072b2", ":"),
    "QCS-1": ("#56b4e9", "-"),
    "QCS-2": ("#0072b2", "-"),
}
TITLES = {"fc": "784-1000-300-100-10", "lenet": "LeNet"}
SLOW = 0.05
Made = dict[str, list[tuple[Any, Any]]]


def draw(made: Made, folder: Path) -> None:
    """All figures, as PNGs in ``folder``."""
    figures = {
        "qcs_regression": regression(made["regression"]),
        "qcs_variance": variance(mean_rows([records.rows for _, records in made["variance"]])),
        "qcs_error": errors([records for _, records in made["trajectories"]]),
        "qcs_workers": workers(made["training"]),
        "qcs_convergence": convergence(made["training"]),
    }
    for name, figure in figures.items():
        save(figure, folder / f"{name}.png")


def curve(result: Any) -> list[tuple[int, float]]:
    """(step, accuracy in %) where a run was validated."""
    rows = [row for row in result.rows if row["validation_accuracy"] is not None]
    return [(row["step"] + 1, 100 * row["validation_accuracy"]) for row in rows]


def style(name: str, **more: Any) -> dict[str, Any]:
    """Colour, line and label of a method."""
    colour, line = STYLES[name]
    return {"color": colour, "linestyle": line, "label": name, "linewidth": 1.5} | more


def panels(count: int) -> tuple[Figure, Any]:
    """``count`` axes in a row."""
    figure, axes = plt.subplots(1, count, figsize=(4.3 * count, 4.2), layout="constrained")
    for each in axes:
        each.grid(True, alpha=0.25)
    return figure, axes


def regression(runs: list[tuple[Any, Any]]) -> Figure:
    """Fig. 2: share of runs that converge against step size; loss at a small and a large one."""
    figure, axes = panels(3)
    last = runs[0][0].steps
    for job, records in runs:
        rows = [row for row in records.rows if row["step"] == last]
        axes[0].plot(
            [r["rate"] for r in rows], [100 * r["converged"] for r in rows], **style(job.method)
        )
        # Where most do not diverge: the paper's small step size, and twice it.
        for panel, rate in zip(axes[1:], (SLOW, 2 * SLOW), strict=True):
            rows = [r for r in records.rows if r["rate"] == rate]
            steps = [r["step"] for r in rows]
            panel.plot(steps, [r["median"] for r in rows], **style(job.method))
            low, high = ([r[side] for r in rows] for side in ("low", "high"))
            if np.isfinite(high).all():
                colour = STYLES[job.method][0]
                panel.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
            panel.set_title(f"step size {rate:g}", fontsize=10)
            panel.set_xlabel("step")
    for panel in axes[1:]:
        panel.set_yscale("log")
        panel.set_ylim(1e-6, 1e3)
        panel.axhline(CONVERGED, color="#999999", linewidth=0.8)
    axes[1].set_ylabel("loss / first loss: median, quartiles")
    axes[0].set_xlabel("step size")
    axes[0].set_ylabel(f"runs that converged after {last} steps, %")
    legend(figure, axes)
    return figure


def mean_rows(of_seeds: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Fig. 3's points, gains and errors averaged over the seeds."""
    columns = ("gain_gaussian", "gaussian", "gain_lenet", "lenet")
    return [
        rows[0] | {column: float(np.mean([row[column] for row in rows])) for column in columns}
        for rows in zip(*of_seeds, strict=True)
    ]


def variance(rows: list[dict[str, Any]]) -> Figure:
    """Fig. 3: bound (thin) and measured variance (marked) against gain, for two gradients."""
    figure, axes = panels(2)
    orders = sorted({r["order"] for r in rows if r["method"] == "QCS"})
    shades = dict(zip(orders, ("#56b4e9", "#0072b2", "#00264d"), strict=True))
    lines = [("QCS", order, f"QCS, n = {order}", shades[order], "o") for order in orders]
    for name, marker in (("QSGD", "s"), ("QSGD L∞", "D"), ("Sparse SGD", "^")):
        order = next(r["order"] for r in rows if r["method"] == name)
        lines.append((name, order, f"{name}, n = {order}", STYLES[name][0], marker))
    for panel, source, title in zip(
        axes, ("gaussian", "lenet"), ("Gaussian vector", "LeNet's gradient"), strict=True
    ):
        for name, order, label, colour, marker in lines:
            points = [r for r in rows if (r["method"], r["order"]) == (name, order)]
            gains = [r[f"gain_{source}"] for r in points]
            panel.plot(
                gains,
                [r[source] for r in points],
                color=colour,
                marker=marker,
                markersize=4,
                linewidth=1.2,
                label=f"{label}: measured",
            )
            if points[0]["bound"] is not None:
                panel.plot(
                    gains,
                    [r["bound"] for r in points],
                    color=colour,
                    linewidth=1,
                    linestyle=":",
                    label=f"{label}: bound",
                )
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.xaxis.set_major_formatter(PLAIN)
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("compression gain, all bits counted")
    axes[0].set_ylabel("E‖ĝ - g‖² / ‖g‖²")
    legend(figure, axes, columns=3)
    return figure


def errors(trajectories: list[Any]) -> Figure:
    """Fig. 4: relative error against the accuracy of the model whose gradient it is."""
    figure, axes = panels(2)
    for panel, (title, methods) in zip(axes, FIG4.items(), strict=True):
        for name in methods:
            rows = [
                r
                for records in trajectories
                for r in records.rows
                if r["panel"] == title and r["method"] == name
            ]
            panel.plot(
                [r["accuracy"] for r in rows],
                [r["error"] for r in rows],
                ".",
                color=STYLES[name][0],
                label=name,
                markersize=6,
            )
        panel.set_yscale("log")
        panel.set_ylim(0.1, 30)
        panel.yaxis.set_major_formatter(PLAIN)
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("accuracy, %")
    axes[0].set_ylabel("‖ĝ - g‖² / ‖g‖²")
    legend(figure, axes)
    return figure


def workers(runs: list[tuple[Any, Any]]) -> Figure:
    """Fig. 6: final accuracy against the number of workers, SGD; mean and range over seeds."""
    figure, axes = panels(2)
    for panel, model in zip(axes, TITLES, strict=True):
        for method, shift in (("baseline", 0.95), ("QCS-1", 1.0), ("QCS-2", 1.05)):
            table = accuracies(runs, model, "SGD", method)
            mean = np.array([np.mean(values) for values in table.values()])
            spread = [
                mean - [min(v) for v in table.values()],
                [max(v) for v in table.values()] - mean,
            ]
            # Side by side, not on top of each other.
            at = [shift * count for count in table]
            panel.errorbar(at, mean, spread, capsize=3, marker="o", markersize=4, **style(method))
        panel.set_xscale("log", base=2)
        panel.set_xticks(list(table))
        panel.xaxis.set_major_formatter(PLAIN)
        panel.set_title(TITLES[model], fontsize=10)
        panel.set_xlabel("workers")
    axes[0].set_ylabel("validation accuracy at the end, %")
    legend(figure, axes)
    return figure


def accuracies(
    runs: list[tuple[Any, Any]], model: str, optimizer: str, method: str
) -> dict[int, list[float]]:
    """Final accuracies in %, a list over seeds for each number of workers, ascending."""
    table: dict[int, list[float]] = {}
    for job, result in runs:
        if (job.model, job.optimizer, job.method) == (model, optimizer, method):
            accuracy = 100 * result.rows[-1]["validation_accuracy"]
            table.setdefault(job.workers, []).append(accuracy)
    return dict(sorted(table.items()))


def convergence(runs: list[tuple[Any, Any]]) -> Figure:
    """Figs 7 and 8: accuracy in the course of training with four workers; mean over seeds."""
    figure, axes = panels(3)
    cases = [("fc", "SGD"), ("lenet", "SGD"), ("lenet", "Adam")]
    for panel, (model, optimizer) in zip(axes, cases, strict=True):
        for method in ("baseline", "QCS-1", "QCS-2"):
            curves = [
                curve(result)
                for job, result in runs
                if job.workers == 4
                and (job.model, job.optimizer, job.method) == (model, optimizer, method)
            ]
            points = np.mean(curves, axis=0)
            panel.plot(points[:, 0], points[:, 1], marker=".", **style(method))
        panel.set_title(f"{TITLES[model]}, {optimizer}, 4 workers", fontsize=10)
        panel.set_xlabel("step")
    axes[0].set_ylabel("validation accuracy, %")
    legend(figure, axes)
    return figure
