"""What all figures share: numbers at their axes, a legend, a file. No window is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

matplotlib.use("Agg")
PLAIN = FuncFormatter(lambda value, _: f"{value:g}")


def save(figure: Figure, path: Path) -> None:
    """As a PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=92, pil_kwargs={"optimize": True})
    plt.close(figure)


def legend(figure: Figure, axes: Any, columns: int = 4) -> None:
    """One for all panels, above them."""
    found: dict[str, Any] = {}
    for each in axes:
        for handle, label in zip(*each.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    show_legend(figure, found, columns)


def show_legend(figure: Figure, handles: dict[str, Any], columns: int) -> None:
    """A legend above all panels; ``handles`` by their labels."""
    labels, place = handles.keys(), "outside upper center"
    figure.legend(handles.values(), labels, loc=place, ncols=columns, fontsize=9, frameon=False)
