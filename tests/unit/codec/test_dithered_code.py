"""Codes of ECDQ: the choice of symbols, by trying all of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hvd_adaptive import ECDQ
from hvd_adaptive.codec import dithered_code
from hvd_adaptive.codec.dithered_code import MOST_SYMBOLS, DitheredCode
from hvd_adaptive.levels.distributions import LOG_EDGES, Histogram

UNIT = 64.0


def law(seed: int, freedom: float) -> Histogram:
    """Of Student's t, of root mean square 1/UNIT."""
    t = np.abs(np.random.default_rng(seed).standard_t(freedom, 50_000))
    t = np.minimum(t / np.sqrt(np.mean(t**2)) / UNIT, 1.0)
    return Histogram(LOG_EDGES, np.histogram(t, LOG_EDGES)[0])


@pytest.mark.parametrize("freedom", [1.5, 4.0, 30.0])
@pytest.mark.parametrize("delta", [0.02, 0.4, 1.1, 2.5, 6.0])
def test_the_best_number_of_symbols(freedom, delta):
    """Among those that of_law considers: the first with at most each share of escapes."""
    own = law(1, freedom)
    shares = dithered_code._beyond(own, UNIT, delta, MOST_SYMBOLS)
    wanted = {int(np.argmax(np.array([*shares[:-1], 0.0]) <= s)) for s in dithered_code._ESCAPED}
    every = [
        DitheredCode(delta, dithered_code._law_of(own, UNIT, delta, MOST_SYMBOLS[index]))
        for index in sorted(wanted)
    ]
    best = min(every, key=lambda code: code.bits(own, UNIT))
    found = DitheredCode.of_law(own, UNIT, delta)
    assert np.array_equal(found.numbers(), best.numbers())


def test_few_books_are_built(monkeypatch):
    """What a fit costs while all ranks wait."""
    built, build = [], dithered_code.PrefixCode.build
    monkeypatch.setattr(dithered_code.PrefixCode, "build", lambda p: built.append(1) or build(p))
    own = law(2, 4.0)
    DitheredCode.of_law(own, UNIT, 1.1)  # of five candidates with four books each
    assert 4 <= len(built) <= 12


def test_the_fitting_rank_keeps_its_books():
    codec = ECDQ(bits=2).parts.default
    update = codec.refit([codec.collect(list(torch.randn(4, 8192)))])
    books = codec._proposed.books
    codec.apply_update(update, 0)
    assert codec.code.books is books and codec._proposed is None
    codec.apply_update(update, 1)
    assert codec.code.books is not books
    assert np.array_equal(codec.code.numbers(), update[7:])
