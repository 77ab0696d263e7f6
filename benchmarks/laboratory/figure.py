"""Draw seconds per exchange as bars."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from laboratory.measure import Result
from laboratory.tables import quartiles

COLOURS = {
    "float32": "0.55",
    "float16": "0.75",
    "PowerSGD": "tab:orange",
    "hvd_adaptive": "tab:blue",
}


def draw(results: list[Result], arguments: Mapping[str, Any], path: str) -> None:
    """Draw medians with quartiles, the fastest first, and the bytes that each host sends."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = sorted((r for r in results if r.seconds), key=lambda r: -r.median)
    figure, axes = pyplot.subplots(figsize=(8, 0.9 + 0.32 * len(shown)), layout="constrained")
    for place, result in enumerate(shown):
        low, high = quartiles(result.seconds)
        kind = result.method.name if result.method.name in COLOURS else "hvd_adaptive"
        spread = [[result.median - low], [high - result.median]]
        axes.barh(place, result.median, xerr=spread, color=COLOURS[kind], label=kind)
        megabytes = result.mean("sent_bytes") / 1e6
        axes.annotate(
            f"{result.median:.3f} s, {megabytes:.1f} MB",
            (high, place),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize="x-small",
        )
    axes.set_yticks(range(len(shown)), [r.method.label for r in shown], fontsize="x-small")
    axes.set_xlabel("seconds per exchange (median, quartiles); bytes that a host sends")
    per_host = arguments.get("ranks_per_host", 1)
    of = f" of {per_host} ranks" if per_host > 1 else ""
    where = f"{arguments['hosts']} hosts{of} at {arguments['rate']}"
    axes.set_title(f"{arguments['model']} on {where}", fontsize="medium")
    axes.margins(x=0.2)
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.legend(unique.values(), unique.keys(), fontsize="x-small", loc="upper right")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
