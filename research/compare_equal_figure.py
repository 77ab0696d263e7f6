"""Accuracy lost against bits sent, every method of compare.py in one figure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from compare_figures import save
from compare_scores import Scores
from drawing import PLAIN, legend

# Colour, marker; those of one family are joined by a line, from few bits to many.
FAMILIES = {
    "SignSGD": ("#999999", "v"),
    "SignSGD-EF": ("#999999", "^"),
    "OneBitSGD": ("#000000", "P"),
    "BinGrad-pb": ("#d55e00", "<"),
    "BinGrad-b": ("#d55e00", ">"),
    "TernGrad": ("#cc79a7", "*"),
    "ORQ": ("#d62728", "o"),
    "ORQ-clip": ("#d62728", "X"),
    "Linear": ("#e69f00", "s"),
    "QSGDinf": ("#7b3fb5", "D"),
    "QSGD": ("#b79ad6", "d"),
    "ALQ": ("#0072b2", "o"),
    "AMQ": ("#56b4e9", "s"),
    "QCS": ("#009e73", "o"),
    "QCS-EF": ("#009e73", "^"),
    "QCS-MMSE": ("#7fce9f", "v"),
    "QCS-MMSE-EF": ("#7fce9f", "^"),
    "QCS-MMSE-rate": ("#7fce9f", "X"),
    "ECDQ": ("#e41a8c", "o"),
    "EDEN": ("#17becf", "p"),
    "SparseSGD": ("#8c564b", "s"),
    "NaturalCompression": ("#000000", "*"),
}
OTHER = ("#444444", "h")
TICKS = (-10, -5, -2, -1, -0.5, 0, 0.5, 1, 2, 5, 10, 20, 50)
# In octaves, about the bits measured.
SPREAD = 0.24


def against_bits(scores: Mapping[str, Scores], path: Path) -> None:
    """One panel a task (title: scores); the deficit's mean and 95% interval."""
    figure, grid = plt.subplots(
        1,
        len(scores),
        figsize=(4.8 * len(scores), 5.6),
        layout="constrained",
        squeeze=False,
        sharey=True,
    )
    for axes, (title, of_task) in zip(grid[0], scores.items(), strict=True):
        families: dict[str, list[str]] = {}
        for name in of_task.outcomes:
            if name != "SuperSGD":
                families.setdefault(_family(name), []).append(name)
        order = [*FAMILIES, *(name for name in families if name not in FAMILIES)]
        for place, family in enumerate(filter(families.get, order)):
            names = sorted(families[family], key=of_task.bits)
            deficits = [of_task.deficit(name) for name in names]
            colour, marker = FAMILIES.get(family, OTHER)
            # Methods of equal bits beside, not upon, one another.
            aside = 2 ** (SPREAD * (place / max(1, len(families) - 1) - 0.5))
            axes.errorbar(
                [aside * of_task.bits(name) for name in names],
                [d.mean for d in deficits],
                np.nan_to_num([d.half for d in deficits]),
                color=colour,
                marker=marker,
                markersize=5,
                linewidth=1,
                elinewidth=0.8,
                alpha=0.85,
                label=family,
            )
        axes.axhline(0, color="#000000", linewidth=0.8)
        axes.set_yscale("symlog", linthresh=1)
        axes.yaxis.set_major_formatter(PLAIN)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(PLAIN)
        axes.grid(True, alpha=0.25)
        axes.set_title(title)
        axes.set_xlabel("bits a coordinate")
    shown = grid[0][0].get_ylim()
    grid[0][0].set_yticks([tick for tick in TICKS if shown[0] <= tick <= shown[1]])
    grid[0][0].set_ylim(shown)
    grid[0][0].set_ylabel("accuracy deficit to SuperSGD, points")
    legend(figure, grid[0][:1], 7)
    save(figure, path)


def _family(name: str) -> str:
    """The method's name without gain, levels, bits or density."""
    return re.sub(r"-[\d.]+(bit)?(?=-|$)", "", name)
