"""Tables 2 to 4 of orq_paper.py's page: accuracies, and what becomes of the paper's claims."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

from compare_scores import Interval
from orq_figures import accuracies, own_errors
from orq_methods import BUCKET, BY_LEVELS, CLIP_BUCKET, CLIPPED, CLIPS, FULL, METHODS
from orq_training import CURVE_SEEDS, Training
from orq_verdicts import all_of, interval, mean, paired, sign, verdict
from qcs_page import table

Runs = list[tuple[Training, Any]]
# In points: what counts as near full precision.
CLOSE = 0.3
LAST = 20


def at_one_size(runs: Runs, images: str) -> str:
    """Table 2, and the other half of Fig. 2."""
    exact = accuracies(runs, FULL, 0)
    found = {method: accuracies(runs, method, BUCKET) for method in METHODS}
    rows = [["-", FULL, mean(exact), "-", mean(last_losses(runs, FULL, 0), 4)]]
    rows += [[str(levels), m, mean(found[m]), interval(paired(found[m], exact)),
              mean(last_losses(runs, m, BUCKET), 4)]
             for levels, methods in BY_LEVELS.items() for m in methods]  # fmt: skip
    pairs = [("ORQ-3", "TernGrad"), ("ORQ-5", "QSGD-5"), ("ORQ-5", "Linear-5"),
             ("ORQ-9", "QSGD-9"), ("ORQ-9", "Linear-9"), ("BinGrad-b", "BinGrad-pb"),
             ("BinGrad-b", "SignSGD"), ("BinGrad-b", "TernGrad"), ("ORQ-9", "ORQ-5"),
             ("ORQ-5", "ORQ-3")]  # fmt: skip
    gains = {pair: paired(found[pair[0]], found[pair[1]]) for pair in pairs}
    claims = [verdict(sign(gain), f"{one} is more accurate than {other}",
                      f"Difference: {interval(gain)}.")
              for (one, other), gain in gains.items()]  # fmt: skip
    return "\n\n".join([
        f"## Table 2: accuracy at bucket size {BUCKET}",
        f"![accuracy while training]({images}/orq_accuracy.png)",
        f"The figure: first {CURVE_SEEDS} seeds, by number of levels. *loss*: of training, mean of "
        f"the last {LAST} steps.",
        table(["levels", "method", "accuracy, %", "less full precision's", "loss"], rows),
        "\n".join(claims),
    ])  # fmt: skip


def last_losses(runs: Runs, method: str, bucket_size: int) -> list[float]:
    """Mean training loss of the last steps of each seed's run."""
    return [statistics.fmean(result.column("loss")[-LAST:]) for job, result in runs
            if (job.method, job.bucket_size, job.clip) == (method, bucket_size, None)]  # fmt: skip


def against_size(runs: Runs, images: str) -> str:
    """Table 3."""
    sizes = sorted({job.bucket_size for job, _ in runs} - {0})
    small, large = sizes[0], sizes[-1]
    found = {(m, size): accuracies(runs, m, size) for m in METHODS for size in sizes}
    rows = [[m, *(mean(found[m, size]) for size in sizes),
             interval(paired(found[m, large], found[m, small]))] for m in METHODS]  # fmt: skip
    loss = {m: paired(found[m, small], found[m, large]) for m in METHODS}
    ahead = {s: paired(found["ORQ-3", s], found["TernGrad", s]) for s in sizes}
    pooled = Interval.of([
        statistics.fmean(pairs) for pairs in zip(*(
            [a - b for a, b in zip(found["ORQ-3", s], found["TernGrad", s], strict=True)]
            for s in sizes), strict=True)
    ])  # fmt: skip
    less = Interval.of([
        (a - b) - (c - d) for a, b, c, d in zip(
            found["TernGrad", small], found["TernGrad", large], found["ORQ-3", small],
            found["ORQ-3", large], strict=True)
    ])  # fmt: skip
    errors = []
    for m in METHODS:
        of_size = [statistics.fmean(own_errors(runs, m, size)) for size in sizes]
        errors.append(
            [m, *(f"{error:.3f}" for error in of_size), f"{of_size[-1] / of_size[0]:.1f}"]
        )
    claims = [
        *(verdict(sign(loss[m]), f"{m} loses accuracy from bucket size {small} to {large}",
                  f"It loses {interval(loss[m])} points.") for m in ("TernGrad", "ORQ-3")),
        verdict(all_of([sign(gain) for gain in ahead.values()]),
                "ORQ-3 is more accurate than TernGrad at every bucket size",
                "; ".join(f"{s}: {interval(gain)}" for s, gain in ahead.items())
                + f"; mean of all: {interval(pooled)}."),
        verdict(sign(less), "ORQ-3 loses less with larger buckets than TernGrad",
                f"From {small} to {large} less by {interval(less)} points."),
    ]  # fmt: skip
    return "\n\n".join([
        "## Table 3: accuracy against bucket size",
        f"![accuracy against bucket size]({images}/orq_buckets.png)",
        f"Full precision: {mean(accuracies(runs, FULL, 0))}. The paper's table has TernGrad and "
        "ORQ-3 alone.",
        table(["method", *map(str, sizes), f"{large} less {small}"], rows),
        "\n".join(claims),
        "Quantisation errors in these trainings (mean over steps and seeds):",
        table(["method", *map(str, sizes), f"{large} over {small}"], errors),
    ])  # fmt: skip


def against_clipping(runs: Runs) -> str:
    """Table 4."""
    exact = accuracies(runs, FULL, 0)
    found = {(m, c): accuracies(runs, m, CLIP_BUCKET, c) for m in CLIPPED for c in CLIPS}
    deficit = {key: paired(values, exact) for key, values in found.items()}
    rows = [[m, *(f"{mean(found[m, c])} ({deficit[m, c].mean:+.2f})" for c in CLIPS)]
            for m in CLIPPED]  # fmt: skip
    ours = CLIPPED[1:]
    claims = []
    for m in ours:
        gain = paired(found[m, 1.7], found[m, 2.5])
        claims.append(verdict(sign(gain), f"{m} is more accurate with c = 1.7 than with c = 2.5",
                              f"Difference: {interval(gain)}."))  # fmt: skip
    for m in CLIPPED[:2]:
        gain = paired(found[m, 2.5], found[m, None])
        claims.append(verdict(sign(gain), f"clipping (c = 2.5) makes {m} more accurate",
                              f"Difference: {interval(gain)}."))  # fmt: skip
    for m in ours:
        away = deficit[m, 1.7]
        near = True if away.low > -CLOSE else False if away.high < -CLOSE else None
        claims.append(verdict(near, f"with c = 1.7 {m} is within {CLOSE:g} points of full "
                              "precision", f"Difference: {interval(away)}."))  # fmt: skip
    by_levels = [paired(found[b, 1.7], found[a, 1.7]) for a, b in itertools.pairwise(ours)]
    claims.append(verdict(all_of([sign(gain) for gain in by_levels]),
                          "with c = 1.7 more levels are more accurate",
                          f"ORQ-5 less ORQ-3: {interval(by_levels[0])}; ORQ-9 less ORQ-5: "
                          f"{interval(by_levels[1])}."))  # fmt: skip
    names = ["no clipping" if c is None else f"c = {c:g}" for c in CLIPS]
    return "\n\n".join([
        "## Table 4: clipping factors",
        f"Bucket size {CLIP_BUCKET}; in brackets the difference to full precision "
        f"({mean(exact)}). The paper's table has c = 1.7 and 2.5, and no TernGrad.",
        table(["method", *names], rows),
        "\n".join(claims),
    ])  # fmt: skip
