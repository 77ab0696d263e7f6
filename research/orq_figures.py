"""The figures of orq_paper.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from drawing import PLAIN, legend, save
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from orq_methods import BUCKET, BY_LEVELS, FULL, SIZED
from orq_training import Training
from qcs_figures import Made, curve

# Okabe and Ito's colours: evenly spaced levels, quantiles, optimised; then those of two levels.
FAMILIES = {
    "TernGrad": "#d55e00",
    "QSGD": "#d55e00",
    "Linear": "#e69f00",
    "ORQ": "#0072b2",
    "BinGrad-pb": "#56b4e9",
    "BinGrad-b": "#00264d",
    "SignSGD": "#009e73",
    FULL: "#000000",
}
SMOOTHED = 9


def draw(made: Made, folder: Path) -> None:
    """All figures, as PNGs in ``folder``."""
    figures = {
        "orq_histograms": histograms(made["histograms"][0][1]),
        "orq_error": errors(made["training"]),
        "orq_accuracy": accuracy(made["training"]),
        "orq_buckets": buckets(made["training"]),
    }
    for name, figure in figures.items():
        save(figure, folder / f"{name}.png")


def style(method: str) -> dict[str, Any]:
    """Colour and label, which is the same whatever the number of levels."""
    family = method if method in FAMILIES else method.partition("-")[0]
    label = "evenly spaced (TernGrad, QSGD)" if family in ("TernGrad", "QSGD") else family
    return {"color": FAMILIES[family], "label": label, "linewidth": 1.4}


def panels(sharey: bool) -> tuple[Figure, Any]:
    """Axes for each number of levels."""
    figure, axes = plt.subplots(
        1, len(BY_LEVELS), figsize=(3.3 * len(BY_LEVELS), 3.9), layout="constrained", sharey=sharey
    )
    for panel, levels in zip(axes, BY_LEVELS, strict=True):
        panel.set_title(f"{levels} levels", fontsize=10)
        panel.grid(True, alpha=0.25)
    return figure, axes


def histograms(records: Any) -> Figure:
    """Fig. 1: counts over the greatest count, before (grey) and after each method."""
    figure, axes = plt.subplots(
        len(BY_LEVELS), 3, figsize=(11, 8.6), layout="constrained", sharex=True, sharey=True
    )

    def points(method: str) -> tuple[np.ndarray, np.ndarray]:
        rows = [row for row in records.rows if row["method"] == method and row["count"]]
        counts = np.array([row["count"] for row in rows], dtype=float)
        return np.array([row["value"] for row in rows]), counts / counts.max()

    places, exact = points(FULL)
    width = np.diff(places).min()
    for line, methods in zip(axes, BY_LEVELS.values(), strict=True):
        for panel, method in zip(line, methods, strict=True):
            panel.bar(places, exact, width, color="#bbbbbb")
            values, shares = points(method)
            panel.vlines(values, 1e-7, shares, color=style(method)["color"], linewidth=2)
            panel.plot(values, shares, "o", color=style(method)["color"], markersize=3.5)
            panel.set_title(method, fontsize=10)
    axes[0, 0].set_yscale("log")
    axes[0, 0].set_ylim(exact.min() / 2, 2)
    figure.supxlabel("value", fontsize=10)
    figure.supylabel("count / greatest count (grey: the gradient)", fontsize=10)
    return figure


def errors(runs: list[tuple[Training, Any]]) -> Figure:
    """Fig. 2: relative quantisation error in each method's own training; mean of the seeds."""
    figure, axes = panels(sharey=True)
    for panel, methods in zip(axes, BY_LEVELS.values(), strict=True):
        for method in methods:
            curve = np.mean(
                [
                    result.column("relative_error")
                    for job, result in runs
                    if (job.method, job.bucket_size, job.clip) == (method, BUCKET, None)
                ],
                axis=0,
            )
            window = min(SMOOTHED, len(curve))
            smooth = np.convolve(curve, np.ones(window) / window, "valid")
            panel.plot(window // 2 + np.arange(len(smooth)), smooth, **style(method))
        panel.set_xlabel("step")
    axes[0].set_yscale("log")
    axes[0].yaxis.set_major_formatter(PLAIN)
    axes[0].set_ylabel("‖Q(G) - G‖² / ‖G‖²")
    legend(figure, axes, columns=6)
    return figure


def accuracy(runs: list[tuple[Training, Any]]) -> Figure:
    """Fig. 2's other half: validation accuracy in the course of training, first seeds."""
    figure, axes = panels(sharey=True)
    for panel, methods in zip(axes, BY_LEVELS.values(), strict=True):
        for method in (FULL, *methods):
            curves = [
                curve(result)
                for job, result in runs
                if job.method == method and job.bucket_size in (0, BUCKET) and job.clip is None
            ]
            longest = max(map(len, curves))
            points = np.mean([one for one in curves if len(one) == longest], axis=0)
            panel.plot(points[:, 0], points[:, 1], marker=".", **style(method))
        panel.set_xlabel("step")
    axes[0].set_ylabel("validation accuracy, %")
    legend(figure, axes, columns=7)
    return figure


def buckets(runs: list[tuple[Training, Any]]) -> Figure:
    """Table 3: final accuracy against bucket size; mean and standard error."""
    figure, panel = plt.subplots(figsize=(6.2, 4.2), layout="constrained")
    exact = np.mean(accuracies(runs, FULL, 0))
    sizes = sorted({job.bucket_size for job, _ in runs if job.method in SIZED and job.clip is None})
    panel.axhline(exact, color=FAMILIES[FULL], linewidth=1, linestyle=":", label=FULL)
    for shift, method in zip((0.97, 1.03), SIZED, strict=True):
        found = [accuracies(runs, method, size) for size in sizes]
        panel.errorbar(
            [shift * size for size in sizes],
            [np.mean(each) for each in found],
            [standard_error(each) for each in found],
            capsize=3,
            marker="o",
            markersize=4,
            **style(method) | {"label": method},
        )
    panel.set_xscale("log", base=2)
    panel.set_xticks(sizes)
    panel.xaxis.set_major_formatter(PLAIN)
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.grid(True, alpha=0.25)
    panel.set_xlabel("bucket size")
    panel.set_ylabel("validation accuracy at the end, %")
    legend(figure, [panel], columns=3)
    return figure


def accuracies(
    runs: list[tuple[Training, Any]], method: str, bucket_size: int, clip: float | None = None
) -> list[float]:
    """Final accuracies in %, in the order of the seeds."""
    return [
        100 * result.rows[-1]["validation_accuracy"]
        for job, result in sorted(runs, key=lambda pair: pair[0].seed)
        if (job.method, job.bucket_size, job.clip) == (method, bucket_size, clip)
    ]


def own_errors(runs: list[tuple[Training, Any]], method: str, bucket_size: int) -> list[float]:
    """Mean relative quantisation error of each of a method's own trainings."""
    return [
        float(np.mean(result.column("relative_error")))
        for job, result in runs
        if (job.method, job.bucket_size, job.clip) == (method, bucket_size, None)
    ]


def standard_error(values: list[float]) -> float:
    """Of the mean; NaN for a single value."""
    if len(values) < 2:
        return float("nan")
    return float(np.std(values, ddof=1) / np.sqrt(len(values)))
