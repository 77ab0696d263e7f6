"""Prefix codes over blocks: lengths, trees and expected bits against textbook computations."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import wire_decoder as wire
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq

from hvd_adaptive.coding import prefix_code
from hvd_adaptive.coding.prefix_code import FLOOR, PrefixCode, grown, limited_lengths


def entropy(p: np.ndarray) -> float:
    return float(-(p * np.log2(p, out=np.zeros_like(p), where=p > 0)).sum())


def best_limited_cost(weights: np.ndarray, longest: int) -> float:
    """The least cost over all lengths that satisfy Kraft's inequality."""
    descending = np.sort(weights)[::-1]
    choices = itertools.combinations_with_replacement(range(1, longest + 1), weights.size)
    return min(
        float(descending @ np.array(lengths))
        for lengths in choices
        if sum(2.0**-bits for bits in lengths) <= 1
    )


def ternary(zero: float) -> np.ndarray:
    return np.array([(1 - zero) / 2, zero, (1 - zero) / 2])


def discrete_normal(alphabet: int, step: float) -> np.ndarray:
    x = (np.arange(alphabet) - (alphabet - 1) / 2) * step
    return np.exp(-x * x / 2) / np.exp(-x * x / 2).sum()


NORMAL = [(4, 1.2), (5, 1), (7, 0.8), (8, 0.6), (8, 1.5), (15, 0.4), (31, 0.15), (127, 0.05)]
NORMAL += [(255, 0.02), (256, 0.6)]
LAWS = {
    **{f"ternary {p}": ternary(p) for p in (0.4, 0.7, 0.9, 0.99, 0.999)},
    **{f"binary {p}": np.array([p, 1 - p]) for p in (0.5, 0.8, 0.99)},
    **{f"normal {a} {d}": discrete_normal(a, d) for a, d in NORMAL},
    "one sure": np.array([0.0, 0.0, 1.0, 0.0, 0.0]),
    "half sure": np.array([0.5, 0.5] + [0.0] * 7),
}


@settings(max_examples=60)
@given(st.lists(st.integers(0, 1000), min_size=2, max_size=7), st.integers(3, 5))
def test_no_limited_lengths_are_better(weights, longest):
    weights = np.array(weights, np.float64)
    lengths = limited_lengths(weights, longest)
    assert lengths.max() <= longest
    assert weights @ lengths == best_limited_cost(weights, longest)


def drawn() -> dict[str, np.ndarray]:
    """Some are all ties, or split one leaf at a time."""
    draw, shapes = np.random.default_rng(3), itertools.product((2, 3, 9, 34, 200), (0.1, 1.0, 10.0))
    found = {f"drawn {a} {c}": np.maximum(draw.dirichlet(np.full(a, c)), FLOOR) for a, c in shapes}
    return found | {"ties": np.ones(7), "one leaf": np.array([1.0, 1e-6, 1e-6])}


class TestTrees:
    """Against the decoder that is written from docs/wire_format.md, a leaf at a time."""

    @pytest.mark.parametrize("law", [*LAWS, *drawn()])
    def test_the_same_book(self, law):
        """Of the same tree and canonical codes, each for the block that is the path to its leaf."""
        p = (LAWS | drawn())[law]
        book, told = PrefixCode.build(p), wire.book_of(p)
        assert book.fingerprint == told.fingerprint
        pool, starts = book.blocks
        assert starts[-1] == pool.size
        for leaf, length in enumerate(book.lengths.tolist()):
            code = int(f"{int(book.codes[leaf]):016b}"[::-1][:length], 2)
            assert told.by_code[length, code] == tuple(pool[starts[leaf] : starts[leaf + 1]])

    @pytest.mark.parametrize(("name", "value"), [("POOL", 900), ("LONGEST_BLOCK", 5)])
    def test_the_same_limits(self, name, value, monkeypatch):
        monkeypatch.setattr(prefix_code, name, value)
        limits = {"pool": prefix_code.POOL, "longest": prefix_code.LONGEST_BLOCK}
        for p in ([0.7, 0.2, 0.1], [0.9, 0.1], [0.25] * 4):
            (children, weights), told = grown(np.array(p), 512), wire.grown(p, 512, **limits)
            assert children.tolist() == told[0] and weights.tolist() == told[1]


class TestBits:
    @pytest.mark.parametrize("law", [law for law in LAWS if "sure" not in law])
    def test_close_to_the_entropy(self, law):
        """Far below one bit a symbol, too."""
        p = LAWS[law]
        bits = PrefixCode.build(p).bits_per_symbol(p)
        assert entropy(p) <= bits + 1e-12 <= (1.01 if p.size < 256 else 1.02) * entropy(p)

    @pytest.mark.parametrize("law", LAWS)
    def test_expected_bits_are_those_of_the_blocks(self, law):
        """Bits of a block over its symbols, both expected over the leaves."""
        book, told = PrefixCode.build(LAWS[law]), wire.book_of(LAWS[law])
        other = np.linspace(1, 2, LAWS[law].size)
        for p in (LAWS[law], other / other.sum()):
            want = told.bits_a_code(p.tolist())
            assert book.bits_per_symbol(p) == pytest.approx(want, rel=1e-9)

    def test_a_symbol_code_where_it_is_as_good(self):
        assert PrefixCode.build(np.full(256, 1 / 256)).lengths.tolist() == [8] * 256
        assert PrefixCode.build([0.5, 0.5]).lengths.tolist() == [1, 1]

    def test_impossible_symbols_have_codes_and_cost_nothing(self):
        book = PrefixCode.build(LAWS["half sure"])
        pool, _ = book.blocks
        assert set(pool.tolist()) == set(range(9))
        assert book.bits_per_symbol(LAWS["half sure"]) < 1.01
        assert PrefixCode.build([1.0, FLOOR / 2]).fingerprint == (
            PrefixCode.build([1.0, 0.0]).fingerprint
        )


def test_wrong_probabilities_are_named():
    pairs = ([0.5, -0.1], [0.0, 0.0], [1.0, np.nan], [np.inf, 1.0])
    for wrong in ([], [1.0], np.ones(4097), np.ones((2, 2)), *pairs):
        with pytest.raises(ValueError, match="probabilities"):
            PrefixCode.build(wrong)
        with pytest.raises(ValueError, match="probabilities"):
            PrefixCode.build([0.5, 0.25, 0.25]).bits_per_symbol(wrong)


# (symbols, least entropy, redundancy over it), as the docstring of PrefixCode.build says.
CLAIMS = [
    (3, 0.012, 0.01),
    (9, 0.06, 0.013),
    (31, 0.12, 0.02),
    (63, 0.12, 0.031),
    (255, 0.5, 0.026),
]
ENTROPIES = (0.012, 0.02, 0.04, 0.06, 0.09, 0.12, 0.16, 0.25, 0.35, 0.5, 0.8, 1.3)


def laplace(k: np.ndarray, scale: float) -> np.ndarray:
    return np.exp(-k / scale)


def normal(k: np.ndarray, scale: float) -> np.ndarray:
    return np.exp(-k * k / (2 * scale * scale))


def student(k: np.ndarray, scale: float) -> np.ndarray:
    return (1 + (k / scale) ** 2) ** -2.0


def spike_and_slopes(k: np.ndarray, rest: float) -> np.ndarray:
    slopes = np.where(k > 0, 0.7**k, 0.0)
    return np.where(k > 0, slopes / slopes.sum() * rest, 1 - rest)


def law_of_entropy(law, alphabet: int, bits: float) -> np.ndarray | None:
    """One frequent symbol, the others falling off on both sides; None where there is none."""
    k = np.abs(np.arange(alphabet) - alphabet // 2).astype(float)

    def of(scale: float) -> np.ndarray:
        weights = law(k, scale)
        return weights / weights.sum()

    low, high = (1e-6, 0.5) if law is spike_and_slopes else (0.02, 40.0)
    if not entropy(of(low)) < bits < entropy(of(high)):
        return None
    return of(brentq(lambda scale: entropy(of(scale)) - bits, low, high))


@pytest.mark.parametrize(("alphabet", "least", "most"), CLAIMS)
def test_the_redundancy_is_what_the_docstring_says(alphabet, least, most):
    found = []
    for law in (laplace, normal, student, spike_and_slopes):
        for bits in ENTROPIES:
            p = law_of_entropy(law, alphabet, bits) if least <= bits else None
            if p is not None:
                found.append(PrefixCode.build(p).bits_per_symbol(p) / entropy(p) - 1)
    assert 0 < max(found) <= most
