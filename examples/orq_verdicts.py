"""Verdicts on claims, as compare_claims.py tells them, and differences paired by seed."""

from __future__ import annotations

import statistics

from compare_scores import Interval
from orq_figures import standard_error


def verdict(holds: bool | None, claim: str, evidence: str) -> str:
    told = {True: "Holds", False: "Does not hold", None: "Not decided"}[holds]
    return f"- **{told}**: {claim}. {evidence}"


def sign(gain: Interval) -> bool | None:
    """Whether the mean is above 0; None where its interval does not say, or there is none."""
    return True if gain.low > 0 else False if gain.high < 0 else None


def interval(gain: Interval) -> str:
    return f"{gain.mean:+.2f} ({gain.low:+.2f} to {gain.high:+.2f})"


def all_of(verdicts: list[bool | None]) -> bool | None:
    """True where all are, False where one is, else not decided."""
    return False if False in verdicts else None if None in verdicts else True


def paired(one: list[float], other: list[float]) -> Interval:
    return Interval.of([a - b for a, b in zip(one, other, strict=True)])


def mean(values: list[float], digits: int = 2) -> str:
    return f"{statistics.fmean(values):.{digits}f} ± {standard_error(values):.{digits}f}"
