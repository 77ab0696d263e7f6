"""The ALQ paper's claims at one setting, and what compare.py's runs say of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from compare_methods import ADAPTIVE, FIXED, METHODS
from compare_runs import CURVE_TASK
from compare_scores import OnTrajectory, Scores
from compare_tasks import TASKS
from verdicts import Claim, Comparison, Interval, paired

# In percentage points of accuracy.
CLOSE = 0.3
# Methods whose table is the same for all gradients: those that Fig. 6 shows.
TABLES = ("QSGDinf", "NUQSGD")


def check_claims(
    scores: Mapping[str, Scores], on_path: Mapping[str, OnTrajectory], bits: int
) -> list[Claim]:
    """Tables 1 and 4, Figs 3 to 6: of those whose methods were run."""
    claims = [
        *(_adaptive_beat_fixed(task, each) for task, each in scores.items()),
        *(
            close_to(each, name, "SuperSGD", TASKS[task].title)
            for name in ("ALQ", "ALQ-N")
            for task, each in scores.items()
        ),
        *(
            _falls_behind(task, method, each)
            for method in ("NUQSGD", "QSGD")
            for task, each in scores.items()
        ),
        *(_lower_loss(task, each) for task, each in scores.items()),
        _lower_variance_in_training(scores),
        *(claim for task, each in on_path.items() for claim in _variance_claims(task, each)),
        *_change_of_variance(on_path),
        _concentrated_levels(scores, bits),
    ]
    return [claim for claim in claims if claim is not None]


def close_to(scores: Scores, own: str, other: str, where: str) -> Claim | None:
    """Not more than CLOSE points behind."""
    if own not in scores or other not in scores:
        return None
    claim = f"{own} is within {CLOSE:g} points of {other} on {where}"
    ahead = scores.ahead(own, other)
    return Claim(claim, f"Points ahead: {Interval.of(ahead)}.", (Comparison(ahead, -CLOSE),))


def less_accurate(scores: Scores, own: str, other: str, where: str) -> Claim | None:
    """A method is behind another one."""
    if own not in scores or other not in scores:
        return None
    behind = scores.ahead(other, own)
    text = f"{own} is less accurate than {other} {where}"
    return Claim(text, f"By {Interval.of(behind)} points.", (Comparison(behind),))


def all_pairs(
    text: str,
    value: Callable[[str], np.ndarray],
    lower: Sequence[str],
    higher: Sequence[str],
    told: str,
) -> Claim | None:
    """A claim that every method of ``lower`` has a lower value than every one of ``higher``."""
    if not lower or not higher:
        return None
    gains = {
        pair: paired(value(pair[1]), value(pair[0])) for pair in itertools.product(lower, higher)
    }
    means = {name: float(value(name).mean()) for name in (*lower, *higher)}
    worst, best = max(lower, key=means.__getitem__), min(higher, key=means.__getitem__)
    evidence = (
        f"{told}: the greatest of these is {worst}'s, {means[worst]:.3g}, the least of the others "
        f"{best}'s, {means[best]:.3g}; {_tally(gains.values())}."
    )
    return Claim(text, evidence, tuple(Comparison(gain) for gain in gains.values()))


def _tally(gains: Iterable[np.ndarray]) -> str:
    """Told by each pair's own interval, as evidence; the verdict is verdicts.py's."""
    intervals = [Interval.of(gain) for gain in gains]
    more, less = sum(i.low > 0 for i in intervals), sum(i.high < 0 for i in intervals)
    return (
        f"by their own intervals {more} of {len(intervals)} pairs are as claimed, {less} the other "
        "way round"
    )


def _adaptive_beat_fixed(task: str, scores: Scores) -> Claim | None:
    text = f"adaptive methods are more accurate than fixed ones on {TASKS[task].title}"
    lower, higher = scores.known(FIXED), scores.known(ADAPTIVE)
    return all_pairs(text, scores.accuracy, lower, higher, "Mean accuracies of fixed methods, %")


def _lower_loss(task: str, scores: Scores) -> Claim | None:
    text = (
        f"adaptive methods end with a lower validation loss than fixed ones on {TASKS[task].title}"
    )
    lower, higher = scores.known(ADAPTIVE), scores.known(FIXED)
    return all_pairs(text, scores.validation_loss, lower, higher, "Mean losses of adaptive methods")


def _falls_behind(task: str, method: str, scores: Scores) -> Claim | None:
    if method not in scores or "SuperSGD" not in scores:
        return None
    size = scores.outcomes[method][0].run.bucket_size
    claim = f"{method} is behind SuperSGD at bucket size {size} on {TASKS[task].title}"
    behind = scores.ahead("SuperSGD", method)
    return Claim(claim, f"Deficit: {Interval.of(behind)}.", (Comparison(behind),))


def _lower_variance_in_training(scores: Mapping[str, Scores]) -> Claim | None:
    """By the mean logarithm over a run, so that no step outweighs the others."""
    if CURVE_TASK not in scores:
        return None
    of_task = scores[CURVE_TASK]

    def value(method: str) -> np.ndarray:
        return np.array([np.log(o.variances).mean() for o in of_task.outcomes[method]])

    known = [m for m in of_task.known((*ADAPTIVE, *FIXED)) if np.isfinite(value(m)).all()]
    return all_pairs(
        f"in their own trainings adaptive methods have less variance on {TASKS[CURVE_TASK].title}",
        value,
        [m for m in known if m in ADAPTIVE],
        [m for m in known if m in FIXED],
        "Mean log variances of adaptive methods, of those that never diverged",
    )


def _variance_claims(task: str, path: OnTrajectory) -> list[Claim | None]:
    adaptive = [m for m in path.methods if m in ADAPTIVE]
    fixed = [m for m in path.methods if m in FIXED]
    title = TASKS[task].title

    def logarithm(of: Callable[[str], np.ndarray]) -> Callable[[str], np.ndarray]:
        return lambda method: np.log(of(method))

    where = f"on SGD's trajectory ({title})"
    return [
        all_pairs(
            f"adaptive methods add less variance than fixed ones {where}",
            logarithm(path.variance),
            adaptive,
            fixed,
            "Mean log variances of adaptive methods",
        ),
        all_pairs(
            "the average gradient has less mean squared error, clipping's bias included, with "
            f"adaptive methods than with fixed ones {where}",
            logarithm(path.error),
            adaptive,
            fixed,
            "Mean log errors of adaptive methods",
        ),
    ]


def _change_of_variance(on_path: Mapping[str, OnTrajectory]) -> list[Claim]:
    """Fig. 1: of SGD's normalised gradients, early, and where the rate is cut."""
    claims = []
    for task, path in on_path.items():
        values, steps = path.column("SGD", "normalized_minibatch"), path.steps()
        if len(steps) < 5 or "SGD" not in path.methods:
            continue
        for first, second, when in (
            (0, 1, "early in training"),
            (2, 3, "after the first cut of the rate"),
        ):
            change = 100 * (values[:, second] / values[:, first] - 1)
            text = f"the variance of SGD's normalised coordinates rises {when}"
            told = f"From step {steps[first]} to {steps[second]} it changes by"
            claims.append(
                Claim(
                    f"{text} on {TASKS[task].title}",
                    f"{told} {Interval.of(change)}%.",
                    (Comparison(change),),
                )
            )
    return claims


def _concentrated_levels(scores: Mapping[str, Scores], bits: int) -> Claim | None:
    """Fig. 6, by the mean positive level at the end of training on the first task."""
    task, of_task = next(iter(scores.items()))
    fixed = {m: _mean_level(m, bits) for m in TABLES if m in of_task}
    adaptive = {
        m: np.array([np.mean(o.levels) for o in of_task.outcomes[m]])
        for m in of_task.known(ADAPTIVE)
    }
    if not fixed or not adaptive:
        return None
    told = ", ".join(f"{m} {levels.mean():.3f}" for m, levels in adaptive.items())
    others = ", ".join(f"{m} {level:.3f}" for m, level in fixed.items())
    return Claim(
        f"the levels of adaptive methods are more concentrated near zero on {TASKS[task].title}",
        f"Means of the positive levels: {told}; {others}.",
        tuple(Comparison(level - own) for own in adaptive.values() for level in fixed.values()),
    )


def _mean_level(method: str, bits: int) -> float:
    codec = METHODS[method].compressor("", bits, 8192, 0, 1, None)
    return float(codec.levels[codec.levels > 0].mean())
