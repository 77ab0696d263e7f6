"""The QSGD and NUQSGD papers' claims, and the ALQ paper's on fits, on compare.py's runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from compare_claims import close_to, less_accurate
from compare_fits import histories_of
from compare_papers import NUQSGD_TRIO
from compare_scores import OnTrajectory, Scores
from compare_tasks import TASKS
from verdicts import Claim, Comparison, Interval

from hvd_adaptive.simulate import Records

# A fit has converged when it is within this share of the objective that it ends at.
SETTLED = 0.01
FEW_SWEEPS = 10


def check_qsgd(scores: Mapping[str, Scores]) -> list[Claim]:
    """Section 5 and Table 1: 4 and 8 bits at bucket size 512, and what is said of fewer."""
    claims = []
    for task, each in scores.items():
        title = TASKS[task].title
        for bits in (8, 4):
            claims.append(close_to(each, f"QSGDinf-{bits}bit-512", "SuperSGD", title))
        for method in ("QSGDinf-4bit-8192", "QSGDinf-2bit-64"):
            claims.append(less_accurate(each, method, "SuperSGD", f"on {title}"))
    return [claim for claim in claims if claim is not None]


def check_nuqsgd(scores: Mapping[str, Scores], on_path: Mapping[str, OnTrajectory]) -> list[Claim]:
    """Figs 3 to 5, with the zero-based levels of that paper."""
    nuqsgd, qsgd, qsgdinf = NUQSGD_TRIO
    claims: list[Claim | None] = []
    for task, each in scores.items():
        title = TASKS[task].title
        if not {*NUQSGD_TRIO, "SGD"} <= set(each.outcomes):
            continue
        for better in (nuqsgd, qsgdinf):
            gain = each.training_loss(qsgd) - each.training_loss(better)
            claims += [
                Claim(
                    f"{better} ends with a lower training loss than {qsgd} on {title}",
                    f"Lower by {Interval.of(gain)}.",
                    (Comparison(gain),),
                ),
                less_accurate(each, qsgd, better, f"on {title}"),
            ]
        claims += [
            close_to(each, nuqsgd, qsgdinf, title),
            less_accurate(each, qsgd, "SGD", f"on {title}"),
            close_to(each, nuqsgd, "SGD", title),
        ]
    for task, path in on_path.items():
        if set(NUQSGD_TRIO) <= set(path.methods):
            claims += _on_trajectory(TASKS[task].title, path)
    return [claim for claim in claims if claim is not None]


def _on_trajectory(title: str, path: OnTrajectory) -> list[Claim]:
    """Fig. 4: on the trajectory of SGD."""
    nuqsgd, qsgd, qsgdinf = NUQSGD_TRIO
    error = {name: path.error(name) for name in NUQSGD_TRIO}
    told = ", ".join(f"{name} {Interval.of(values)}" for name, values in error.items())
    variance = path.column(qsgd, "normalized_excess")
    # From before the first cut of the rate to the end.
    change = 100 * (variance[:, -1] / variance[:, 2] - 1)
    return [
        Claim(
            f"{qsgd}'s variance on SGD's path is above {nuqsgd}'s and {qsgdinf}'s on {title}",
            f"Of the average of all workers, in units of SGD's minibatch variance: {told}.",
            tuple(Comparison(np.log(error[qsgd] / error[m])) for m in (nuqsgd, qsgdinf)),
        ),
        Claim(
            f"{nuqsgd} and {qsgdinf} have less variance than single-worker SGD on {title}",
            f"In the same units, SGD having 1: {told}.",
            tuple(Comparison(-np.log(error[m])) for m in (nuqsgd, qsgdinf)),
        ),
        Claim(
            f"{qsgd}'s normalised variance stays within a quarter of itself when the rate is cut "
            f"on {title}",
            f"It changes by {Interval.of(change)}%.",
            (Comparison(change, -25.0), Comparison(-change, -25.0)),
        ),
    ]


def check_fits(records: Sequence[Records]) -> list[Claim]:
    """ALQ's Fig. 8 and section 3.1: how fits converge, one gradient a seed."""
    histories = [histories_of(each) for each in records]
    claims = []
    for objective in histories[0]:
        fits = [each[objective] for each in histories]
        starts = ("uniform", "exponential")
        sweeps = {
            s: np.array([_settled(fit[f"coordinate descent, {s} start"]) for fit in fits])
            for s in starts
        }
        told = ", ".join(f"{s} {Interval.of(each)}" for s, each in sweeps.items())
        claims.append(
            Claim(
                f"coordinate descent converges in fewer than {FEW_SWEEPS} sweeps: {objective}",
                f"Sweeps until within {100 * SETTLED:g}% of its last value, by start: {told}.",
                tuple(Comparison(FEW_SWEEPS - each) for each in sweeps.values()),
            )
        )
        ends = np.array(
            [[fit[name][-1] for name in fit if not name.startswith("AMQ")] for fit in fits]
        )
        apart = 100 * (ends.max(axis=1) / ends.min(axis=1) - 1)
        claims.append(
            Claim(
                "different starts and solvers end at different values (a hundredth apart or "
                f"more): {objective}",
                f"The greatest is above the least by {Interval.of(apart)}%.",
                (Comparison(apart, 1.0),),
            )
        )
    return claims


def _settled(values: np.ndarray) -> int:
    return int(np.argmax(values <= (1 + SETTLED) * values[-1]))
