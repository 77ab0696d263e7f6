"""The verdicts of the pages of results: errors on simulated nulls, power, and each step by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import verdicts
from scipy import stats
from verdicts import FAILS, HOLDS, OPEN, Claim, Comparison, decide

SEEDS, PAGES = 20, 100


def most(rate: float, trials: int) -> float:
    """Largest count that a binomial of this rate reaches within five sigma."""
    return trials * rate + 5 * math.sqrt(trials * rate * (1 - rate))


def claim(*differences: np.ndarray, margin: float = 0.0) -> Claim:
    return Claim("a", "b.", tuple(Comparison(each, margin) for each in differences))


def words(claims: list[Claim]) -> list[str]:
    return [verdict.word for verdict in decide(claims)]


LAWS = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "heavy tails": lambda rng, shape: rng.standard_t(3, size=shape),
    "rounded": lambda rng, shape: np.round(rng.normal(size=shape)),
    # One seed in four diverges, as often to either side.
    "diverging": lambda rng, shape: (
        rng.normal(size=shape) + 50 * rng.choice([-1, 0, 0, 0, 0, 0, 0, 1], size=shape)
    ),
}


@pytest.mark.parametrize("law", LAWS)
def test_a_page_of_nulls_has_a_wrong_verdict_as_rarely_as_it_says(law):
    """20 claims of which none is true: any decision on the page, in either direction, is wrong."""
    rng = np.random.default_rng(1)
    wrong = sum(
        any(word != OPEN for word in words([claim(row) for row in LAWS[law](rng, (20, SEEDS))]))
        for _ in range(PAGES)
    )
    assert wrong <= most(verdicts.ALPHA, PAGES)


def test_a_single_null_is_decided_nearly_as_often_as_it_may_be():
    """So the rule is not merely silent: of normal differences 5% are decided, half to each side."""
    rng = np.random.default_rng(2)
    found = [words([claim(row)])[0] for row in rng.normal(size=(2000, SEEDS))]
    for word in (HOLDS, FAILS):
        assert found.count(word) <= most(verdicts.ALPHA / 2, 2000)
        assert found.count(word) >= 2000 * verdicts.ALPHA / 2 / 2


def test_a_difference_by_the_margin_is_a_null():
    """ "Within 0.3 points" of what is exactly 0.3 points behind."""
    rng = np.random.default_rng(8)
    behind = rng.normal(loc=-0.3, size=(2000, SEEDS))
    found = [words([claim(row, margin=-0.3)])[0] for row in behind]
    assert found.count(HOLDS) <= most(verdicts.ALPHA / 2, 2000)
    near = [words([claim(row, margin=-2.3)])[0] for row in behind[:100]]
    assert near == [HOLDS] * 100


@pytest.mark.parametrize("size", [1, 2, 3, 6, 7])
def test_sign_flips_by_enumeration(size):
    rng = np.random.default_rng(size)
    for values in (rng.normal(size=size), np.round(rng.normal(size=size)), np.ones(size)):
        sums = [np.dot(signs, values) for signs in itertools.product((1, -1), repeat=size)]
        share = np.mean([total >= values.sum() - 1e-9 for total in sums])
        assert verdicts._sign_flips(values) == pytest.approx(share)


def test_student_is_scipys():
    values = np.random.default_rng(9).normal(loc=0.3, size=12)
    test = stats.ttest_1samp(values, 0.1, alternative="greater")
    assert verdicts._student(values - 0.1) == pytest.approx(test.pvalue)
    interval = verdicts.Interval.of(values)
    low, high = stats.ttest_1samp(values, 0).confidence_interval()
    assert (interval.low, interval.high) == pytest.approx((low, high))


def test_holm_by_hand():
    assert verdicts._holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert verdicts._holm([0.9, 0.6]) == pytest.approx([1.0, 1.0])


def test_one_bad_comparison_is_enough_and_one_open_one_too_many():
    good, bad = np.arange(1.0, 21.0), -np.arange(1.0, 21.0)
    open_ = np.array([1.0, -1.0] * 10)
    assert words([claim(good, good)]) == [HOLDS]
    assert words([claim(good, bad)]) == [FAILS]
    assert words([claim(good, open_)]) == [OPEN]


def test_equal_values_and_single_seeds():
    assert words([claim(np.full(20, 2.0)), claim(np.zeros(20)), claim(np.full(20, -2.0))]) == [
        HOLDS,
        OPEN,
        FAILS,
    ]
    assert words([claim(np.array([5.0]))]) == [OPEN]


def test_computed_claims_do_not_weaken_the_others():
    values = np.random.default_rng(10).normal(loc=1, size=20)
    alone = decide([claim(values)])[0]
    computed = [Claim("c", "d.", computed=True), Claim("c", "d.", computed=False)] * 10
    *others, last = decide([*computed, claim(values)])
    assert last == alone
    assert [v.word for v in others] == [HOLDS, FAILS] * 10 and others[0].p is None


def test_a_page():
    text = verdicts.page(
        [
            "# Title\n",
            "{rule}",
            [claim(np.arange(1.0, 21.0))],
            "",
            [Claim("bytes are equal", "96 of 96.", computed=True)],
        ]
    )
    assert text.startswith("# Title\n\n**Verdicts.**")
    assert "over the 1 tested claims" in text
    assert "- **Holds** (p < 0.0001): a. b." in text
    assert text.endswith("- **Holds** (computed): bytes are equal. 96 of 96.\n")


def test_wrong_input():
    with pytest.raises(ValueError, match="finite numbers"):
        Comparison([1.0, float("nan")])
    with pytest.raises(ValueError, match="must be at most 40"):
        Comparison(np.zeros(41))
    with pytest.raises(ValueError, match="either comparisons or computed"):
        Claim("a", "b.")
