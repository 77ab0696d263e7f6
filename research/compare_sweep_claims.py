"""The ALQ paper's claims on bucket size, bits, workers and clipping (Figs 7, 14; Table 2)."""

from __future__ import annotations

from collections.abc import Mapping

from compare_claims import CLOSE, close_to, less_accurate
from compare_methods import ADAPTIVE, FIXED
from compare_scores import Scores
from compare_studies import LARGE, SMALL, SWEEP_TASK, Sweep
from compare_tasks import TASKS
from verdicts import Claim, Comparison, Interval

BY_VALUE = Mapping[int, Scores]


def check_sweeps(sweeps: Mapping[str, Sweep]) -> list[Claim]:
    """``sweeps``: by setting, as studies.swept gives them; empty where not run."""
    by_size, by_bits, by_workers, clipped = (
        _by_value(sweeps.get(setting, {})) for setting in ("bucket_size", "bits", "workers", "clip")
    )
    claims = [
        *(_loses_with_size(method, by_size) for method in ("NUQSGD", "QSGD", "QSGDinf")),
        _loses_least("ALQ", FIXED, "fixed methods", by_size),
        _loses_least("ALQ", (*FIXED, *ADAPTIVE), "all other methods", by_size),
        _best_everywhere(by_size, "bucket sizes"),
        _best_everywhere(by_bits, "numbers of bits"),
        *(_behind("AMQ", "ALQ", by_size, size, f"bucket size {size}") for size in (64, 32768)),
        _behind("AMQ", "ALQ", by_bits, 2, "2 bits"),
        _near("NUQSGD", "ALQ", by_size, 100, "bucket size 100"),
        *_many_workers(by_workers),
        *(_clipped(clipped, size) for size in clipped),
    ]
    return [claim for claim in claims if claim is not None]


def _by_value(sweep: Sweep) -> dict[int, Scores]:
    values = sorted({value for row in sweep.values() for value in row})
    return {value: Scores(o for row in sweep.values() for o in row[value]) for value in values}


def _title() -> str:
    return TASKS[SWEEP_TASK].title


def _loses_with_size(method: str, by_size: BY_VALUE) -> Claim | None:
    if not by_size or any(method not in scores for scores in by_size.values()):
        return None
    drop = by_size[SMALL].accuracy(method) - by_size[LARGE].accuracy(method)
    text = f"{method} loses accuracy from bucket size {SMALL} to {LARGE} ({_title()})"
    return Claim(text, f"It loses {Interval.of(drop)} points.", (Comparison(drop),))


def _loses_least(own: str, others: tuple[str, ...], told: str, by_size: BY_VALUE) -> Claim | None:
    if not by_size:
        return None
    small, large = by_size[SMALL], by_size[LARGE]
    known = [m for m in small.known(dict.fromkeys(others)) if not m.startswith(own)]
    if own not in small or not known:
        return None
    loss = {m: small.accuracy(m) - large.accuracy(m) for m in (own, *known)}
    more = {m: loss[m] - loss[own] for m in known}
    return Claim(
        f"{own} loses less accuracy from bucket size {SMALL} to {LARGE} than {told} ({_title()})",
        f"It loses {Interval.of(loss[own])} points; the others more than it by "
        f"{_list({m: Interval.of(each) for m, each in more.items()})}.",
        tuple(Comparison(each) for each in more.values()),
    )


def _best_everywhere(by_value: BY_VALUE, told: str) -> Claim | None:
    ahead = {
        (m, value): scores.ahead("ALQ", m)
        for value, scores in by_value.items()
        if "ALQ" in scores
        for m in scores.known((*FIXED, *ADAPTIVE))
        if not m.startswith("ALQ")
    }
    if not ahead:
        return None
    intervals = {key: Interval.of(each) for key, each in ahead.items()}
    least = sorted(intervals, key=lambda key: intervals[key].mean)[:3]
    return Claim(
        f"ALQ is more accurate than all methods but ALQ-N at all {told}: "
        f"{', '.join(map(str, sorted(by_value)))} ({_title()})",
        f"{len(ahead)} pairs; the least leads are "
        f"{_list({f'{m} at {value}': intervals[m, value] for m, value in least})}.",
        tuple(Comparison(each) for each in ahead.values()),
    )


def _behind(own: str, other: str, by_value: BY_VALUE, value: int, where: str) -> Claim | None:
    scores = by_value.get(value)
    text = f"at {where} ({_title()})"
    return None if scores is None else less_accurate(scores, own, other, text)


def _near(own: str, other: str, by_value: BY_VALUE, value: int, where: str) -> Claim | None:
    scores = by_value.get(value)
    return None if scores is None else close_to(scores, own, other, f"{_title()} at {where}")


def _many_workers(by_workers: BY_VALUE) -> list[Claim | None]:
    claims: list[Claim | None] = []
    for count, scores in by_workers.items():
        where = f"{_title()} with {count} workers"
        claims += [close_to(scores, name, "SuperSGD", where) for name in ("ALQ", "AMQ")]
        pairs = [(a, f) for a in scores.known(ADAPTIVE) for f in scores.known(FIXED)]
        if pairs:
            ahead = {f"{a} of {f}": scores.ahead(a, f) for a, f in pairs}
            claims.append(
                Claim(
                    f"adaptive methods are more accurate than fixed ones on {where}",
                    f"Ahead: {_list({told: Interval.of(each) for told, each in ahead.items()})}.",
                    tuple(Comparison(each) for each in ahead.values()),
                )
            )
        if count == max(by_workers):
            claims.append(close_to(scores, "TernGrad", "SuperSGD", where))
    return claims


def _clipped(clipped: BY_VALUE, size: int) -> Claim | None:
    scores = clipped[size]
    known = [m for m in scores.known((*FIXED, *ADAPTIVE)) if not m.startswith("ALQ")]
    if not known or not {"ALQ", "ALQ-N"} <= set(scores.outcomes):
        return None
    ahead = {f"{a} of {m}": scores.ahead(a, m) for a in ("ALQ", "ALQ-N") for m in known}
    return Claim(
        f"clipped, ALQ and ALQ-N are at most {CLOSE:g} points behind the others at bucket size "
        f"{size} ({_title()})",
        f"Ahead: {_list({told: Interval.of(each) for told, each in ahead.items()})}.",
        tuple(Comparison(each, -CLOSE) for each in ahead.values()),
    )


def _list(intervals: Mapping[str, Interval]) -> str:
    return ", ".join(f"{told} {interval}" for told, interval in intervals.items())
