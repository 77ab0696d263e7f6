"""The oracle's own laws by Monte Carlo, and errors that are planted to see that it finds them."""

from __future__ import annotations

import numpy as np
import pytest

from oracle import cases
from oracle.averages import Expected, exact, mean_of, second_stage
from oracle.bounds import FIVE_SIGMA, deviation
from oracle.laws import Law, Quantiser, law_of
from oracle.projected import Projection, squared_rows
from oracle.rounding import of_full, of_quantised
from oracle.verdict import CHANCE, Judge, regions_of

LEVELS = np.array([-1.0, -0.3, -0.05, 0.05, 0.3, 1.0])
TABLE = Quantiser("alq", 64, levels=LEVELS)
COUNT, RANKS, STEPS = 2000, 4, 4
WHOLE = {"all": np.arange(COUNT)}


def rounded(law: Law, rng: np.random.Generator) -> np.ndarray:
    """A draw of a law of two points."""
    gap = np.where(law.high > law.low, law.high - law.low, 1.0)
    return np.where(rng.random(law.mean.size) < (law.mean - law.low) / gap, law.high, law.low)


def vectors(step: int = 0) -> list[np.ndarray]:
    return [cases.vector("normal", COUNT, [step, rank]) for rank in range(RANKS)]


def judged(plant, steps: int = STEPS) -> list[str]:
    """What a judge says of averages to which ``plant`` has done something."""
    judge, regions = Judge(), dict(regions_of({"a": [slice(0, 900)], "b": [slice(900, COUNT)]}))
    for step in range(steps):
        rng = np.random.default_rng(step)
        laws = [law_of(TABLE, v) for v in vectors(step)]
        result = plant(laws, rng)
        expected = Expected(mean_of(laws), of_quantised(laws, "float32"))
        judge.see(step, result, expected, regions)
    return judge.end()


def averaged(laws, rng):
    return np.mean([rounded(law, rng) for law in laws], axis=0)


def test_right_averages_pass():
    assert judged(averaged, steps=20) == []


def overwritten(laws, rng):
    """One rank's bucket is another one's, as when memory is used again too early."""
    drawn = [rounded(law, rng) for law in laws]
    drawn[1][64:128] = drawn[1][128:192]
    return np.mean(drawn, axis=0)


def mean_of_sides(laws, up) -> np.ndarray:
    """The mean of laws' upper values where ``up`` says so of a law, else of their lower ones."""
    return np.mean([np.where(up(law), law.high, law.low) for law in laws], axis=0)


def chance(law) -> np.ndarray:
    return (law.mean - law.low) / (law.high - law.low)


def shared_numbers(laws, rng):
    """All ranks round by the same random numbers."""
    u = rng.random(COUNT)
    return mean_of_sides(laws, lambda law: u < chance(law))


def nearest(laws, rng):
    """Rounding to the nearest level, which is biased."""
    return mean_of_sides(laws, lambda law: law.mean - law.low > law.high - law.mean)


def forgotten(laws, rng):
    """One rank is left out of the sum."""
    return np.sum([rounded(law, rng) for law in laws[1:]], axis=0) / RANKS


def leaning(laws, rng):
    """Up a tenth of the gap too often."""
    return mean_of_sides(laws, lambda law: rng.random(COUNT) < chance(law) + 0.1)


PLANTED = {
    "overwritten memory": overwritten,
    "shared random numbers": shared_numbers,
    "rounding to the nearest level": nearest,
    "a rank left out": forgotten,
    "a rounding that leans": leaning,
    "one coordinate of another": lambda *of: np.where(np.arange(COUNT) == 5, 9.0, averaged(*of)),
    "the exact average": lambda laws, rng: mean_of(laws).mean,
    "NaN": lambda *of: np.where(np.arange(COUNT) == 5, np.nan, averaged(*of)),
    "all of it a percent too large": lambda *of: 1.01 * averaged(*of),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_errors_are_found(name):
    assert judged(PLANTED[name])


def test_sections_in_full_precision_are_exact_but_for_rounding():
    v = vectors()
    expected = exact(np.mean(v, axis=0), of_full(v, "float32"))
    right = np.mean(v, axis=0).astype(np.float32).astype(np.float64)
    for error, wrong in ((0.0, False), (1e-4, True)):
        judge = Judge()
        judge.see(0, right + error * (np.arange(COUNT) == 7), expected, WHOLE)
        assert bool(judge.end()) == wrong


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("levels", [np.linspace(-1, 1, 7), LEVELS], ids=["uniform", "alq"])
def test_a_second_stage_adds_at_most_what_is_allowed_for(norm, levels):
    """And a wrong second stage is found: here all of the average's random part is lost."""
    second = Quantiser("qsgd", 64, levels=levels, norm=norm)
    laws = [law_of(TABLE, v) for v in vectors()]
    first, rng = mean_of(laws), np.random.default_rng(3)
    expected = Expected(first, of_quantised(laws, "float32"), *second_stage(second, first, CHANCE))
    judge, wrong = Judge(), Judge()
    for step in range(10):
        judge.see(step, rounded(law_of(second, averaged(laws, rng)), rng), expected, WHOLE)
        wrong.see(step, rounded(law_of(second, -averaged(laws, rng)), rng), expected, WHOLE)
    assert judge.end() == []
    assert wrong.end()


def test_projections_have_the_variance_that_is_said():
    """QCS by its equations, 20,000 times: never more than the bound, and not half of it."""
    rng, order, rows, q, draws = np.random.default_rng(1), 16, 12, 2.0, 20_000
    g, w = rng.standard_normal(order), rng.standard_normal(order)
    h = np.array([[(-1) ** bin(i & j).count("1") for j in range(order)] for i in range(order)])
    np.testing.assert_allclose(
        squared_rows(order, rows)[0, 1], ((h[:rows].T @ h[:rows])[0, 1] / rows) ** 2
    )
    signs = rng.choice([-1.0, 1.0], (draws, order))
    v = (signs * g) @ h[:rows].T / np.sqrt(rows)
    scale = np.abs(v).max(axis=1, keepdims=True) / q
    u = rng.uniform(-0.5, 0.5, v.shape)
    decoded = signs * ((scale * (np.round(v / scale + u) - u)) @ h[:rows]) / np.sqrt(rows)
    error, law = decoded - g, Projection(g, order, rows, q, "unbiased")
    for seen, most in (
        ((error @ w).var(), law.along(w)),
        ((error**2).sum(1).mean(), law.variance.sum()),
    ):
        assert 0.5 * most < seen < 1.05 * most
    assert np.sqrt((error**2).sum(1)).max() <= law.length
    np.testing.assert_allclose(error.mean(axis=0), 0, atol=5 * error.std() / np.sqrt(draws))


def test_deviation_is_bernsteins_and_no_less_than_five_sigma():
    for variance, largest in ((1.0, 0.0), (4.0, 0.5), (1e-3, 2.0)):
        t = deviation(variance, largest, FIVE_SIGMA)
        chance = 2 * np.exp(-(t**2) / 2 / (variance + largest * t / 3))
        assert chance == pytest.approx(FIVE_SIGMA)
        assert t >= 5 * np.sqrt(variance)
