"""The papers' claims, checked one by one on compare.py's runs."""

from __future__ import annotations

import argparse

import numpy as np
from compare_methods import ADAPTIVE, FIXED
from compare_runs import Outcome
from compare_scores import Interval, Scores, variance_ratios
from compare_studies import SWEEP_TASK, swept
from compare_tasks import TASKS

# In percentage points of accuracy.
CLOSE = 0.3


def check_claims(
    args: argparse.Namespace, scores: dict[str, Scores], outcomes: list[Outcome]
) -> list[str]:
    """A line of Markdown for each claim: whether it holds, and the figures that say so."""
    sweep = swept(args, "bucket_size", outcomes)
    by_bucket: dict[int, Scores] = {}
    for size in sorted({size for row in sweep.values() for size in row}):
        by_bucket[size] = Scores(o for row in sweep.values() for o in row[size])
    claims = [
        *(_adaptive_beat_fixed(TASKS[task].title, each) for task, each in scores.items()),
        *(_close_to_supersgd(TASKS[task].title, each) for task, each in scores.items()),
        *(
            _falls_behind(TASKS[task].title, method, each, args.bucket_size)
            for method in ("NUQSGD", "QSGD")
            for task, each in scores.items()
        ),
        *(_loses_with_size(method, by_bucket) for method in ("NUQSGD", "QSGD")),
        _least_sensitive(by_bucket),
        *_variance_claims(args),
        _terngrad_catches_up(swept(args, "workers", outcomes)),
    ]
    return [CLAIMS, *(f"- {claim}" for claim in claims if claim), ""]


CLAIMS = """"Holds" and "does not hold" are decided by the figures of this page alone. Intervals are
95%, paired by seed, each by itself (no correction for their number).
"""


def verdict(holds: bool | None, claim: str, evidence: str) -> str:
    """A claim with its judgement; None: the runs do not decide it."""
    told = {True: "Holds", False: "Does not hold", None: "Not decided"}[holds]
    return f"**{told}**: {claim}. {evidence}"


def _adaptive_beat_fixed(title: str, scores: Scores) -> str:
    adaptive, fixed = scores.known(ADAPTIVE), scores.known(FIXED)
    if not adaptive or not fixed:
        return ""
    worst, best = min(adaptive, key=scores.mean), max(fixed, key=scores.mean)
    gains = [scores.deficit(f, to=a) for a in adaptive for f in fixed]
    better = sum(gain.low > 0 for gain in gains)
    worse = sum(gain.high < 0 for gain in gains)
    evidence = (
        f"The lowest adaptive mean is {worst}'s {scores.mean(worst):.2f}%, the highest fixed one "
        f"{best}'s {scores.mean(best):.2f}%. Of {len(gains)} pairs the adaptive method is better "
        f"in {better}, worse in {worse} and not to be told apart in {len(gains) - better - worse}."
    )
    holds = scores.mean(worst) > scores.mean(best)
    return verdict(holds, f"adaptive methods beat fixed ones on {title}", evidence)


def _close_to_supersgd(title: str, scores: Scores) -> str:
    known = scores.known(("ALQ", "ALQ-N")) if "SuperSGD" in scores else []
    if not known:
        return ""
    deficits = {method: scores.deficit(method) for method in known}
    told = "; ".join(f"{m}: {d.mean:+.2f}, up to {d.high:+.2f}" for m, d in deficits.items())
    holds = any(deficit.high <= CLOSE for deficit in deficits.values())
    claim = f"ALQ or ALQ-N is within {CLOSE:g} points of SuperSGD on {title} (interval's upper end)"
    return verdict(holds, claim, f"Deficits: {told}.")


def _falls_behind(title: str, method: str, scores: Scores, size: int) -> str:
    if method not in scores or "SuperSGD" not in scores:
        return ""
    deficit = scores.deficit(method)
    evidence = f"Deficit: {deficit.mean:+.2f} ({deficit.low:+.2f} to {deficit.high:+.2f})."
    claim = f"{method} is behind SuperSGD at bucket size {size} on {title}"
    return verdict(deficit.low > 0, claim, evidence)


def _loses_with_size(method: str, by_bucket: dict[int, Scores]) -> str:
    if not by_bucket or any(method not in scores for scores in by_bucket.values()):
        return ""
    small, large = min(by_bucket), max(by_bucket)
    drop = Interval.of(by_bucket[small].accuracy(method) - by_bucket[large].accuracy(method))
    evidence = f"It loses {drop.mean:.2f} points ({drop.low:+.2f} to {drop.high:+.2f})."
    claim = f"{method} loses accuracy from bucket size {small} to {large}"
    return verdict(drop.low > 0, f"{claim} ({TASKS[SWEEP_TASK].title})", evidence)


def _least_sensitive(by_bucket: dict[int, Scores]) -> str:
    methods = [] if not by_bucket else next(iter(by_bucket.values())).known((*FIXED, *ADAPTIVE))
    if not {"ALQ", "ALQ-N"} & set(methods):
        return ""
    means = {m: [each.mean(m) for each in by_bucket.values()] for m in methods}
    ranges = {m: max(values) - min(values) for m, values in means.items()}
    told = ", ".join(f"{m} {r:.2f}" for m, r in sorted(ranges.items(), key=lambda pair: pair[1]))
    spreads = [s.accuracy(m).var(ddof=1) / len(s.accuracy(m)) for s in by_bucket.values()
               for m in methods if len(s.accuracy(m)) > 1]  # fmt: skip
    error = np.sqrt(np.median(spreads)) if spreads else float("nan")
    holds = min(ranges, key=ranges.get) in ("ALQ", "ALQ-N")
    claim = f"ALQ is the least sensitive to bucket size ({min(by_bucket)} to {max(by_bucket)})"
    return verdict(
        holds,
        claim,
        f"Greatest minus least mean accuracy, in points: {told}. "
        f"A mean's standard error is {error:.2f} (median), so only the largest of "
        "these are told apart.",
    )


def _variance_claims(args: argparse.Namespace) -> list[str]:
    claims = []
    for task, ratios in variance_ratios(args).items():
        adaptive = {m: r for m, r in ratios.items() if m in ADAPTIVE}
        fixed = {m: r for m, r in ratios.items() if m in FIXED}
        if adaptive and fixed:
            worst, best = max(adaptive, key=adaptive.get), min(fixed, key=fixed.get)
            evidence = (
                f"Largest of the adaptive: {worst}, {adaptive[worst]:.3g} times SGD's minibatch "
                f"variance; smallest of the fixed: {best}, {fixed[best]:.3g} times."
            )
            claim = (
                f"on SGD's trajectory adaptive methods add less variance than fixed ones "
                f"({TASKS[task].title})"
            )
            claims.append(verdict(adaptive[worst] < fixed[best], claim, evidence))
    return claims


def _terngrad_catches_up(sweep: dict[str, dict[int, list[Outcome]]]) -> str:
    if not {"TernGrad", "SuperSGD"} <= set(sweep):
        return ""
    few, many = min(sweep["TernGrad"]), max(sweep["TernGrad"])
    gaps = {}
    for workers in (few, many):
        gaps[workers] = Scores(o for m in ("SuperSGD", "TernGrad") for o in sweep[m][workers])
    first, last = (gaps[workers].deficit("TernGrad") for workers in (few, many))
    evidence = (
        f"Its deficit is {first.mean:+.2f} points with {few} and {last.mean:+.2f} ({last.low:+.2f} "
        f"to {last.high:+.2f}) with {many}, {len(gaps[few].accuracy('TernGrad'))} seeds."
    )
    # Decided where the whole interval lies on one side of what counts as close.
    holds = True if last.high <= CLOSE else False if last.low > CLOSE else None
    claim = f"TernGrad comes within {CLOSE:g} points of SuperSGD with {many} workers"
    return verdict(holds, f"{claim} ({TASKS[SWEEP_TASK].title})", evidence)
