"""The one rule by which the pages of results say that a claim holds, or does not.

1. A claim makes one or more comparisons. Each is a list of differences paired by seed, positive if
   the claim is right, and a margin that their mean must exceed.
2. Each comparison has a p-value for both directions: the larger of Student's paired t test and of
   the sign-flip test, which needs no normal law (all 2^n flips are counted).
3. A claim is accepted if all of its comparisons are (the largest p counts), and rejected if one
   goes the other way (the least p counts, times the number of comparisons).
4. Holm's correction is applied over both directions of all claims of a page. So the chance that a
   page has any wrong verdict is at most ``ALPHA``. What is not significant is not decided.

A claim without chance, such as one on the bytes of a message, is computed and needs no test.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

ALPHA = 0.05
HOLDS, FAILS, OPEN = "Holds", "Does not hold", "Not decided"
MOST_SEEDS = 40


@dataclass(frozen=True)
class Interval:
    """A mean and the half-width of its 95% interval (Student's t); NaN for a single value."""

    mean: float
    half: float

    @classmethod
    def of(cls, values: Sequence[float] | np.ndarray) -> Interval:
        """From independent values."""
        values = np.asarray(values, dtype=float)
        if len(values) < 2:
            return cls(float(values.mean()), float("nan"))
        error = values.std(ddof=1) / np.sqrt(len(values))
        return cls(float(values.mean()), float(stats.t.ppf(0.975, len(values) - 1) * error))

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    def __str__(self) -> str:
        if np.isnan(self.half):
            return f"{self.mean:+.2f}"
        return f"{self.mean:+.2f} ({self.low:+.2f} to {self.high:+.2f})"


def paired(one: Sequence[float] | np.ndarray, other: Sequence[float] | np.ndarray) -> np.ndarray:
    """one - other, seed by seed."""
    return np.subtract(one, other, dtype=float)


class Comparison:
    """Is the mean of ``differences`` above ``margin``? See step 2 of the module."""

    def __init__(self, differences: Sequence[float] | np.ndarray, margin: float = 0.0) -> None:
        self.excess = np.asarray(differences, dtype=float) - margin
        if self.excess.ndim != 1 or not np.isfinite(self.excess).all():
            raise ValueError(f"differences={differences!r}: must be a list of finite numbers")
        if len(self.excess) > MOST_SEEDS:
            raise ValueError(f"differences: {len(self.excess)}; must be at most {MOST_SEEDS}")

    @property
    def above(self) -> float:
        """p-value of "the mean is not above the margin"."""
        return _one_sided(self.excess)

    @property
    def below(self) -> float:
        """p-value of "the mean is not below the margin"."""
        return _one_sided(-self.excess)


def _one_sided(excess: np.ndarray) -> float:
    if len(excess) < 2:
        return 1.0
    return max(_student(excess), _sign_flips(excess))


def _student(excess: np.ndarray) -> float:
    error = excess.std(ddof=1) / np.sqrt(len(excess))
    if error == 0:
        return 0.0 if excess[0] > 0 else 1.0
    return float(stats.t.sf(excess.mean() / error, len(excess) - 1))


def _sign_flips(excess: np.ndarray) -> float:
    """Share of all choices of signs whose sum is at least the observed one, exactly."""
    half = len(excess) // 2
    left, right = _signed_sums(excess[:half]), np.sort(_signed_sums(excess[half:]))
    # What is equal but for rounding counts as equal.
    wanted = excess.sum() - 1e-9 * np.abs(excess).sum() - left
    reached = len(right) - np.searchsorted(right, wanted)
    return float(reached.sum() / (len(left) * len(right)))


def _signed_sums(values: np.ndarray) -> np.ndarray:
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums + value, sums - value])
    return sums


@dataclass(frozen=True)
class Claim:
    """text: a sentence's beginning, in small letters. evidence: the figures, whole sentences.
    comparisons: all must be above their margins. computed: whether it holds, of a claim that has
    no chance in it, in place of comparisons."""

    text: str
    evidence: str
    comparisons: tuple[Comparison, ...] = ()
    computed: bool | None = None

    def __post_init__(self) -> None:
        if bool(self.comparisons) == (self.computed is not None):
            raise ValueError(f"{self.text}: give either comparisons or computed")


@dataclass(frozen=True)
class Verdict:
    """p: after Holm's correction, of the likelier direction; None if the claim was computed."""

    word: str
    p: float | None


def decide(claims: Sequence[Claim], alpha: float = ALPHA) -> list[Verdict]:
    """Verdicts of all claims of one page together, in their order."""
    tested = [claim for claim in claims if claim.comparisons]
    p = [side for claim in tested for side in _both_directions(claim.comparisons)]
    corrected = iter(_holm(p))
    verdicts = []
    for claim in claims:
        if claim.computed is not None:
            verdicts.append(Verdict(HOLDS if claim.computed else FAILS, None))
            continue
        up, down = next(corrected), next(corrected)
        word = HOLDS if up <= alpha else FAILS if down <= alpha else OPEN
        verdicts.append(Verdict(word, min(up, down)))
    return verdicts


def _both_directions(comparisons: Sequence[Comparison]) -> tuple[float, float]:
    """p-values of "one is not above its margin" and of "all are at or above it"."""
    up = max(comparison.above for comparison in comparisons)
    down = len(comparisons) * min(comparison.below for comparison in comparisons)
    return up, min(1.0, down)


def _holm(p: Sequence[float]) -> np.ndarray:
    """p-values corrected for their number (Holm 1979): valid under any dependence."""
    values = np.asarray(p, dtype=float)
    order = np.argsort(values, kind="stable")
    steps = values[order] * np.arange(len(values), 0, -1)
    corrected = np.empty_like(values)
    corrected[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return corrected


def page(parts: Sequence[str | Sequence[Claim]], alpha: float = ALPHA) -> str:
    """Markdown of texts and lists of claims, which are all decided together. ``{rule}`` in a text
    becomes the rule."""
    claims = [claim for part in parts if not isinstance(part, str) for claim in part]
    found = iter(decide(claims, alpha))
    tested = sum(bool(claim.comparisons) for claim in claims)
    texts = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part.replace("{rule}", RULE.format(count=tested, alpha=100 * alpha)))
        else:
            texts.append("\n".join(_line(claim, next(found)) for claim in part))
    return "\n\n".join(text.strip("\n") for text in texts if text.strip()) + "\n"


def write_page(path: Path, parts: Sequence[str | Sequence[Claim]]) -> None:
    """Write ``page`` of the parts into a file, and make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(parts), encoding="utf-8")


RULE = """**Verdicts.** One rule decides all claims (`research/verdicts.py`). A claim compares
values that are paired by seed. Each comparison is tested by Student's t test and by the sign-flip
test, and the larger p counts. A claim holds if all of its comparisons do, and does not hold if one
of them goes the other way. Holm's correction over the {count} tested claims of this page, both
directions counted, keeps the chance of any wrong verdict on it at {alpha:g}%. What is not
significant is not decided. p is given after the correction. Intervals are 95%, Student's t, each
by itself."""


def _line(claim: Claim, verdict: Verdict) -> str:
    return f"- **{verdict.word}** ({_how(verdict.p)}): {claim.text}. {claim.evidence}"


def _how(p: float | None) -> str:
    if p is None:
        return "computed"
    return "p < 0.0001" if p < 1e-4 else f"p = {p:.2g}"
