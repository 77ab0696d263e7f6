"""Fig. 2 of the QCS paper on qcs_paper.py's page."""

from __future__ import annotations

from typing import Any

import numpy as np
from compare_tables import table
from qcs_regression import BATCH, CONVERGED, INPUTS, OUTPUTS, RATES, fastest, widest
from verdicts import Claim, Comparison

Parts = list[str | list[Claim]]


def regression(runs: list[tuple[Any, Any]], images: str) -> Parts:
    """Text, figure, table and claims."""
    job = runs[0][0]
    by_name = {run.method: records for run, records in runs}
    rows = []
    for name, records in by_name.items():
        steps, rate = fastest(records)
        rows.append(
            [
                name,
                f"{records.settings['gain']:.1f}",
                f"{records.settings['error']:.2f}",
                f"{widest(records):g}",
                "none" if steps is None else f"{steps} at {rate:g}",
            ]
        )
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
        table(
            [
                "method",
                "gain",
                "error on Gaussian",
                "largest step size at which half converge",
                "fewest steps",
            ],
            rows,
        ),
        _regression_claims(by_name),
        "A run's widest step size is the largest up to which it converges at every step size. Each "
        "method's best step size is chosen on the first half of the runs and compared on the "
        f"second. Runs that do not converge count as {job.steps + 1} steps.",
    ]


def _regression_claims(by_name: dict[str, Any]) -> list[Claim]:
    limits = {name: np.array(r.settings["limits"]) for name, r in by_name.items()}
    fewest = {name: _at_best_rate(r) for name, r in by_name.items()}
    others = [name for name in limits if name.startswith(("QSGD", "Sparse"))]
    printed = [name for name in others if name.endswith("Eq. 11")]
    same = [name for name in others if not name.endswith(("one bucket", "Eq. 11"))]
    large = [name for name in others if name.endswith("one bucket")]

    def wider(text: str, wide: str, narrow: list[str]) -> Claim:
        told = "; ".join(f"{name} {limits[name].mean():.3f}" for name in narrow)
        return Claim(
            text,
            f"Means of the runs: {wide} {limits[wide].mean():.3f}; {told}.",
            tuple(Comparison(limits[wide] - limits[name]) for name in narrow),
        )

    def faster(text: str, own: str, slow: list[str]) -> Claim:
        told = "; ".join(f"{name} {fewest[name].mean():.0f}" for name in (own, *slow))
        return Claim(
            text,
            f"Mean steps: {told}.",
            tuple(Comparison(fewest[name] - fewest[own]) for name in slow),
        )

    return [
        wider("compression narrows the range of step sizes", "baseline", others),
        wider(
            "QCS widens the range against QSGD and Sparse SGD, all with partitions of about n",
            "QCS",
            same,
        ),
        wider(
            "it also does where all take larger partitions, QCS 320, the others all 3,200",
            "QCS, n = 320",
            large,
        ),
        wider("it also does by the paper's account of bits", "QCS, Eq. 11", printed),
        faster(
            "QCS is faster than QSGD and Sparse SGD at each one's best step size, with "
            "partitions of about n",
            "QCS",
            same,
        ),
        faster("it is with larger partitions", "QCS, n = 320", large),
        faster("it is by the paper's account of bits", "QCS, Eq. 11", printed),
        _half_the_steps(by_name, "QCS", "QSGD", "all bits counted"),
        _half_the_steps(by_name, "QCS, Eq. 11", "QSGD, Eq. 11", "by the paper's account of bits"),
    ]


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
