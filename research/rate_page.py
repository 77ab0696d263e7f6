"""The figure and the page of rate_curve.py."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import rate_bound
import verdicts
from compare_tables import table
from drawing import PLAIN, save
from verdicts import Claim, Comparison

from hvd_adaptive.simulate import Records
from hvd_adaptive.simulate.records import Row

# ECDQ is to be ahead of every other unbiased scheme from here to there.
LEAST, MOST = 1.2, 8.0
SHOWN_BITS = (1.2, 2.0, 3.0, 4.0, 6.0, 8.0)
# Five series are drawn in colour and named. The others stand behind them, in grey.
COLOURS = {
    "ECDQ": "#000000",
    "ALQ": "#0072b2",
    "QSGD L∞": "#e69f00",
    "ORQ": "#009e73",
    "QCS": "#d62728",
}
FADED = "#c4c4c4"


def draw(records: Records, path: Path) -> None:
    """One panel for each gradient; biased schemes hollow and without a line."""
    stages = list(dict.fromkeys(records.column("step")))
    figure, axes = plt.subplots(
        1,
        len(stages),
        figsize=(5.2 * len(stages), 5.6),
        sharey=True,
        layout="constrained",
        squeeze=False,
    )
    for each, stage in zip(axes[0], stages, strict=True):
        for name, rows in _by_scheme(records.rows, stage).items():
            _draw_series(each, name, rows)
        each.set_xscale("log", base=2)
        each.set_yscale("log")
        each.xaxis.set_major_formatter(PLAIN)
        each.set_ylim(3e-6, 300)
        each.set_title(f"LeNet's gradient at step {stage}")
        each.set_xlabel("wire bits per coordinate, all included")
        each.grid(True, which="major", alpha=0.3)
    axes[0][0].set_ylabel("mean squared error / ||g||²")
    named = dict(zip(*reversed(axes[0][0].get_legend_handles_labels()), strict=True))
    order = [label for label in (*COLOURS, *OTHERS.values()) if label in named]
    handles = [named[label] for label in order]
    figure.legend(handles, order, loc="outside lower center", ncols=len(order), fontsize=10)
    save(figure, path)


# By whether they are unbiased.
OTHERS = {1: "other unbiased schemes and codings", 0: "biased or clipped schemes"}


def _draw_series(axes: Any, name: str, rows: list[Row]) -> None:
    unbiased = rows[0]["unbiased"]
    colour = COLOURS.get(name, FADED if unbiased else "#808080")
    is_named = name in COLOURS
    axes.plot(
        *zip(*_points(rows), strict=True),
        label=name if is_named else OTHERS[unbiased],
        color=colour,
        markersize=5 if is_named else 3.5,
        linestyle="-" if unbiased else "none",
        marker="o" if unbiased else "s",
        markerfacecolor=None if unbiased else "none",
        linewidth=2.4 if is_named else 0.9,
        zorder=3 if is_named else 2,
    )


def write_page(records: Records, bound: Records, page: Path) -> None:
    """Markdown."""
    stages = list(dict.fromkeys(records.column("step")))
    coordinates = records.settings["limit"] or 431_080
    sections: list[str | list[Claim]] = [
        "# Error against bits on the wire\n\n"
        "Made by `python research/rate_curve.py`: every scheme of the package on the gradient of a "
        f"LeNet on MNIST (batch 64) at {', '.join(f'step {s}' for s in stages)}, {coordinates:,} "
        "coordinates in one payload, buckets of 8192. Schemes with a fit are fitted to the "
        "gradient. Bits are those of whole payloads, scales and header included; the error is "
        "||Q(g) - g||²/||g||². " + _how(records),
        "{rule}",
        "![error against bits](images/rate_curve.png)",
        "Five schemes are in colour. The others, and schemes with lossless coding, are grey; the "
        "table below has the numbers of all of them.",
        "Filled points and lines: unbiased schemes, whose error is all variance, so that it falls "
        "as 1/N in the average over N ranks. Hollow squares: biased or clipped ones, part of whose "
        "error stays, and which need error feedback; they are not compared with the others.",
        [_claim(records, stages)],
        _table(records, stages),
        *rate_bound.section(bound),
    ]
    verdicts.write_page(page, sections)


def _how(records: Records) -> str:
    """Which errors are exact, and how well the others are known."""
    schemes = {row["scheme"].split(",")[0]: row["exact"] for row in records.rows}
    exact = ", ".join(dict.fromkeys(name for name, known in schemes.items() if known))
    drawn = ", ".join(dict.fromkeys(name for name, known in schemes.items() if not known))
    return (
        f"It is exact, the expectation over the rounding (ALQ paper, Eqs 1 and 2; ORQ paper, Eq. "
        f"9), for {exact}. It is the mean of {records.settings['draws']} draws for {drawn}; the "
        f"greatest relative standard error of these means is {_worst(records):.0%}."
    )


def _worst(records: Records) -> float:
    draws = [
        each
        for stage in dict.fromkeys(records.column("step"))
        for rows in _by_scheme(records.rows, stage).values()
        for _, each in _draws(rows)
        if len(each) > 1
    ]
    errors = [np.std(each, ddof=1) / np.sqrt(len(each)) / np.mean(each) for each in draws]
    return float(max(errors, default=0.0))


def _draws(rows: list[Row]) -> list[tuple[float, list[float]]]:
    """(bits, errors of the draws) of each point, in order of bits."""
    found: dict[tuple[float, str], list[float]] = {}
    for row in sorted(rows, key=lambda row: (row["bits"], row["parameter"], row["draw"])):
        found.setdefault((row["bits"], row["parameter"]), []).append(row["error"])
    return [(bits, errors) for (bits, _), errors in found.items()]


def _points(rows: list[Row]) -> list[tuple[float, float]]:
    """(bits, mean error), in order of bits."""
    return [(bits, float(np.mean(errors))) for bits, errors in _draws(rows)]


def _by_scheme(rows: Iterable[Row], stage: int) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row["step"] == stage:
            found.setdefault(row["scheme"], []).append(row)
    return found


def _error_at(rows: list[Row], bits: float) -> float | None:
    """Return a scheme's error at ``bits``, its logarithm interpolated; None outside its range."""
    return _interpolated(_points(rows), bits)


def _interpolated(points: Iterable[tuple[float, float]], bits: float) -> float | None:
    x, y = np.array(list(points)).T
    if not x[0] <= bits <= x[-1]:
        return None
    return float(np.exp(np.interp(bits, x, np.log(y))))


def _claim(records: Records, stages: list[int]) -> Claim:
    """ECDQ's error, draw by draw, against each other unbiased point's mean at that point's bits."""
    ratios, comparisons, beyond = [], [], 0
    for stage in stages:
        schemes = _by_scheme(records.rows, stage)
        own = _draws(schemes["ECDQ"])
        for name, rows in schemes.items():
            if name == "ECDQ" or not rows[0]["unbiased"]:
                continue
            for bits, errors in _draws(rows):
                if not LEAST <= bits <= MOST:
                    continue
                draws = range(min(len(each) for _, each in own))
                ours = [_interpolated(((x, y[i]) for x, y in own), bits) for i in draws]
                if None in ours:
                    beyond += 1
                    continue
                others = errors if len(errors) > 1 else errors * len(ours)
                gains = np.log(others) - np.log(ours)
                comparisons.append(Comparison(gains))
                told = f"{name} at step {stage} and {bits:.2f} bits"
                ratios.append((float(np.exp(-gains.mean())), told))
    ratios.sort(reverse=True)
    ahead = sum(ratio < 1 for ratio, _ in ratios)
    closest = "; ".join(f"{ratio:.2f} ({told})" for ratio, told in ratios[:3])
    outside = f" {beyond} points lie outside what ECDQ was measured at." if beyond else ""
    return Claim(
        f"ECDQ has less variance than every other unbiased scheme from {LEAST:g} to {MOST:g} bits, "
        "on these gradients",
        f"It has less at {ahead} of {len(ratios)} points of the others; its own error is "
        f"interpolated between its points. The largest ratios of its error to theirs are "
        f"{closest}.{outside}",
        tuple(comparisons),
    )


def _table(records: Records, stages: list[int]) -> str:
    """Errors of unbiased schemes at equal bits."""
    parts = []
    for stage in stages:
        rows = [
            [name, *(_told(_error_at(of, bits)) for bits in SHOWN_BITS)]
            for name, of in _by_scheme(records.rows, stage).items()
            if of[0]["unbiased"] and len(_points(of)) > 1
        ]
        head = ["scheme", *(f"{bits:g} bits" for bits in SHOWN_BITS)]
        parts.append(f"Step {stage}, unbiased schemes, interpolated:\n\n{table(head, rows)}")
    return "\n\n".join(parts)


def _told(error: float | None) -> str:
    return "" if error is None else f"{error:.3g}"
