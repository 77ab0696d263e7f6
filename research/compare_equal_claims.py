"""The papers' claims about methods at equal wire bits, checked on compare.py's runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from compare_claims import CLOSE
from compare_scores import Scores
from compare_tasks import TASKS
from verdicts import Claim, Comparison, Interval

LEVELS = (3, 5, 9)
BITS_1 = ("BinGrad-pb", "BinGrad-b")
# (ahead, behind, whose claim or question it is)
PAIRS = (
    ("BinGrad-b", "SignSGD", "ORQ paper, Table 2"),
    ("BinGrad-pb", "SignSGD", "ORQ paper, Table 2, two networks of three"),
    ("BinGrad-b", "QSGDinf-3", "ORQ paper, section 5.1.3, one worker; at fewer bits"),
    ("BinGrad-pb", "QSGDinf-3", "ORQ paper, section 5.1.3, one worker; at fewer bits"),
    ("ORQ-3-clip", "ORQ-3", "clipping helps three levels: ORQ paper, section 5.1.3"),
    ("SignSGD-EF", "SignSGD", "does error feedback help?"),
    ("QCS-32-EF", "QCS-32", "does error feedback help?"),
    ("QCS-32-MMSE-EF", "QCS-32-MMSE", "does error feedback help?"),
    ("QCS-32-MMSE", "QCS-32", "is least error best, at the task's rate?"),
    ("QCS-32-MMSE-rate", "QCS-32-MMSE", "do longer steps make up for the estimator's?"),
)
# (method, compared with, source)
AS_GOOD = (
    ("ORQ-3", "QSGDinf-9", "ORQ paper, section 5.2.2: half the bits"),
    ("OneBitSGD", "SuperSGD", "Seide et al. 2014"),
    ("NaturalCompression", "SuperSGD", "Horváth et al. 2019"),
    ("QCS-32", "SuperSGD", "QCS paper, Figs 6 and 7, gain 32"),
)


def check_equal_claims(scores: Mapping[str, Scores]) -> list[Claim]:
    """One for each claim whose methods were run."""
    known = set.intersection(*(set(of_task.outcomes) for of_task in scores.values()))
    claims = []
    for s in LEVELS:
        own, others = f"ORQ-{s}", [f"Linear-{s}", f"QSGDinf-{s}"]
        if {own, *others} <= known:
            told = f"{own} trains to higher accuracy than {others[0]} and {others[1]}"
            claims.append(_ahead(scores, own, others, f"{told} on every task (ORQ paper, Table 2)"))
            claims.append(_less_error(scores, own, others))
    if {*BITS_1, "SignSGD"} <= known:
        claims.append(_less_error(scores, "BinGrad-b", ["BinGrad-pb", "SignSGD"]))
    for first, second, source in PAIRS:
        if {first, second} <= known:
            told = f"{first} is ahead of {second} on every task ({source})"
            claims.append(_ahead(scores, first, [second], told))
    for first, second, source in AS_GOOD:
        if {first, second} <= known:
            claims.append(_as_good(scores, first, second, source))
    return claims


def _short(task: str) -> str:
    return TASKS[task].title.split(",")[0]


def _ahead(scores: Mapping[str, Scores], own: str, others: Sequence[str], claim: str) -> Claim:
    gains = {(t, o): s.ahead(own, o) for t, s in scores.items() for o in others}
    comparisons = tuple(Comparison(gain) for gain in gains.values())
    return Claim(claim, f"Points ahead: {_told(gains, others)}.", comparisons)


def _less_error(scores: Mapping[str, Scores], own: str, others: Sequence[str]) -> Claim:
    """By the logarithms of the errors' ratios, seed by seed."""
    ratios = [np.log(s.error(o) / s.error(own)) for s in scores.values() for o in others]
    told = "; ".join(
        f"{_short(task)}: "
        + ", ".join(f"{name} {s.error(name).mean():.3g}" for name in (own, *others))
        for task, s in scores.items()
    )
    claim = (
        f"{own}'s error in training is less than {' and '.join(others)}'s on every task (ORQ "
        "paper, Fig. 2)"
    )
    evidence = f"Of the average gradient: {told}."
    return Claim(claim, evidence, tuple(Comparison(ratio) for ratio in ratios))


def _as_good(scores: Mapping[str, Scores], own: str, other: str, source: str) -> Claim:
    gains = {(task, other): s.ahead(own, other) for task, s in scores.items()}
    claim = f"{own} comes within {CLOSE:g} points of {other} on every task ({source})"
    comparisons = tuple(Comparison(gain, -CLOSE) for gain in gains.values())
    return Claim(claim, f"Points ahead: {_told(gains, [other])}.", comparisons)


def _told(gains: Mapping[tuple[str, str], np.ndarray], others: Sequence[str]) -> str:
    parts: dict[str, list[str]] = {}
    for (task, other), each in gains.items():
        name = f"{other} " if len(others) > 1 else ""
        parts.setdefault(task, []).append(f"{name}{Interval.of(each)}")
    return "; ".join(f"{_short(task)}: {', '.join(told)}" for task, told in parts.items())
