"""Code lengths: Huffman and Elias codes of real symbols beside the bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optimal_levels import Samples
from theory_oracles import (
    ORDERS,
    TABLES,
    exponential,
    hard_vectors,
    huffman_bits,
    quantize,
    symbol_shares,
    uniform,
)
from unit_oracles import omega

from hvd_adaptive.levels import entropy_bits
from hvd_adaptive.theory import (
    code_length_bound,
    nonzero_bound,
    nuqsgd_code_length,
    qsgd_code_length,
    qsgd_dense_code_length,
    sparse_code_bits,
    sparse_code_length_bound,
)


def alq_bits(v, magnitudes, symmetric, order):
    """Expected bits of ALQ's code of Q(v): Huffman of the symbols, signs, 32 for the norm."""
    shares = symbol_shares(v, magnitudes, symmetric, order)
    signs = 0.0
    if not symmetric:
        zero = magnitudes.size - 1
        shares = np.concatenate([shares[zero:][:1], shares[zero + 1 :] + shares[:zero][::-1]])
        signs = v.size * (1 - shares[0])
    return 32 + signs + v.size * huffman_bits(shares)


@pytest.mark.many
@pytest.mark.parametrize("dimension", [2, 300, 8192])
@pytest.mark.parametrize("name", TABLES)
def test_huffman_codes_never_exceed_theorems_3_and_10(name, dimension):
    """With the vector's own law as the distribution, and without any."""
    magnitudes, symmetric = TABLES[name]
    for order in ORDERS:
        loose = code_length_bound(magnitudes, dimension, order, symmetric)
        for v in hard_vectors(magnitudes, symmetric, dimension, order):
            r = np.clip(np.abs(v) / np.linalg.norm(v, ord=order), 0, 1)
            tight = code_length_bound(magnitudes, dimension, order, symmetric, Samples.of(r))
            measured = alq_bits(v, magnitudes, symmetric, order)
            assert measured <= min(tight, loose) * (1 + 1e-9), (order, measured, tight, loose)


def test_code_length_bound_is_nearly_reached():
    """Two magnitudes, one of them nearly sure: Huffman pays a bit for no entropy. Theorem 3."""
    v = np.full(1000, 1.0)
    v[0] = 1.0001
    r = v / v.max()
    bound = code_length_bound([0.0, 1.0], 1000, np.inf, False, Samples.of(r))
    assert 0.999 * bound < alq_bits(v, np.array([0.0, 1.0]), False, np.inf) <= bound


def test_formulas_by_hand():
    """Theorem 10, then 3, with the number of nonzero coordinates; QSGD's and NUQSGD's."""
    assert code_length_bound([0.05, 0.1, 0.4, 1.0], 1000, np.inf, True) == 32 + 1000 * (3 + 1)
    expected = 16 + (4 + 2 * 10) + 100 * (np.log2(3) + 1)
    found = code_length_bound([0.0, 0.5, 1.0], 100, 2, False, norm_bits=16)
    np.testing.assert_allclose(found, expected)
    np.testing.assert_allclose(nonzero_bound(uniform(3), 10_000), 3 * (3 + 100))
    np.testing.assert_allclose(nonzero_bound(exponential(3), 10_000), 64 + 8 * 100)
    expected = 32 + 101 * (3 + 1.5 * np.log2(20002 / 101))
    np.testing.assert_allclose(qsgd_code_length(1, 10_000), expected)
    np.testing.assert_allclose(qsgd_code_length(100, 10_000), 9 * 10_000 + 32)
    assert qsgd_dense_code_length(1000) == 2832
    assert qsgd_dense_code_length(1000, norm_bits=0) == 2800
    n = 4 + 2 * np.sqrt(500)  # s = 1 and d = 500
    expected = 32 + n * (3 + np.log2(500 / n) + np.log2(0.5 * np.log2(8 * 504 / n)))
    np.testing.assert_allclose(nuqsgd_code_length(1, 500), expected)


@given(
    seed=st.integers(0, 1000),
    dimension=st.sampled_from([1, 20, 400]),
    order=st.sampled_from([1, 2, 4, np.inf]),
)
def test_nonzero_bound_is_never_exceeded(seed, dimension, order):
    rng = np.random.default_rng(seed)
    levels = np.sort(10.0 ** rng.uniform(-4, 0, 4))
    levels[0], levels[-1] = 0.0, 1.0
    bound = nonzero_bound(levels, dimension, order)
    assert bound <= dimension
    for v in hard_vectors(levels, False, dimension, order, seed):
        r = np.minimum(np.abs(v) / np.linalg.norm(v, ord=order), 1.0)
        assert np.minimum(r / levels[1], 1.0).sum() <= bound * (1 + 1e-9)


def test_sparse_code():
    code, run = "", 0
    numbers = [0, 0, 3, -1, 0, 0, 0, 0, 2, 0]
    for k in numbers:
        run += 1
        if k:
            code += omega(run) + ("0" if k > 0 else "1") + omega(abs(k))
            run = 0
    assert sparse_code_bits(numbers) == 32 + len(code)
    assert sparse_code_bits(np.zeros(7, int), norm_bits=16) == 16


def leading_bits(numbers):
    """What the sparse code would take were |Elias(k)| = log2 k + 1: the theorems without o(1)."""
    where = np.flatnonzero(numbers)
    gaps, values = np.diff(where, prepend=-1), np.abs(numbers[where])
    return 32 + 3 * where.size + np.log2(gaps).sum() + np.log2(values).sum()


def level_numbers(rng, v, magnitudes):
    return quantize(rng, v, magnitudes)[0] - (magnitudes.size - 1)


SPARSE = {
    "qsgd": (uniform, qsgd_code_length, [(1, 8192), (7, 8192), (1, 30_000)]),
    "nuqsgd": (exponential, nuqsgd_code_length, [(1, 8192), (4, 30_000)]),
}


@pytest.mark.parametrize("scheme", SPARSE)
def test_formulas_without_their_o1_bound_codes_without_it(scheme):
    """Mean of 20 roundings + 5 deviations; and not by more than four times for the worst vector."""
    table, formula, cases = SPARSE[scheme]
    for s, d in cases:
        rng, most = np.random.default_rng(s), 0.0
        for v in hard_vectors(table(s), False, d, 2):
            bits = [leading_bits(level_numbers(rng, v, table(s))) for _ in range(20)]
            assert np.mean(bits) + 5 * np.std(bits) / np.sqrt(20) <= formula(s, d), (s, d)
            most = max(most, np.mean(bits))
        assert formula(s, d) <= 4 * most, (s, d)


ZERO_BASED = {name: table for name, (table, symmetric) in TABLES.items() if not symmetric} | {
    "qsgd-90": uniform(90)
}


@pytest.mark.many
@pytest.mark.parametrize("dimension", [1, 300, 8192])
@pytest.mark.parametrize("name", ZERO_BASED)
def test_sparse_codes_never_exceed_their_bound(name, dimension):
    """Mean of 10 roundings, less 5 deviations of it."""
    table, most = ZERO_BASED[name], 0.0
    rng, bound = np.random.default_rng(dimension), sparse_code_length_bound(table, dimension)
    for v in hard_vectors(table, False, dimension, 2):
        bits = [sparse_code_bits(level_numbers(rng, v, table)) for _ in range(10)]
        assert np.mean(bits) - 5 * np.std(bits) / np.sqrt(10) <= bound
        most = max(most, np.mean(bits))
    assert bound - 32 <= 2.5 * (most - 32)


def test_sparse_code_length_bound_by_hand():
    """One level, 1, and d = 10,000: N = 101 at most, gaps of 10,000 / 101, between 64 and 128, and
    S = 1 + 99, the last number from ``variance_bound``, a bit for each."""
    assert [len(omega(64)), len(omega(128))] == [13, 14]
    gap = 1 + 13 + (10_000 / 101 - 64) / 64
    expected = 101 * gap + 100
    np.testing.assert_allclose(sparse_code_length_bound([0, 1], 10_000), 32 + expected)
    np.testing.assert_allclose(sparse_code_length_bound([0, 1], 10_000, norm_bits=0), expected)


def test_sparse_code_at_root_n_takes_more_than_corollary_3_3_where_nothing_is_zero():
    """2.8 n is a dense code's; the sparse one takes 3 n of a constant vector at s = sqrt(n)."""
    n = 8100
    numbers = level_numbers(np.random.default_rng(0), np.ones(n), uniform(90))
    assert sparse_code_bits(numbers) == 32 + 3 * n > qsgd_dense_code_length(n)


@pytest.mark.parametrize("dimension", [1024, 16_384])
def test_dense_code_of_corollary_3_3(dimension):
    """Huffman over signed integers at s = sqrt(n), for every vector of the list."""
    table = uniform(int(np.sqrt(dimension)))
    found = []
    for v in hard_vectors(table, False, dimension, 2):
        shares = symbol_shares(v, table, False)
        found.append(32 + dimension * huffman_bits(shares))
        assert found[-1] <= qsgd_dense_code_length(dimension)
        assert entropy_bits(shares) <= np.log2(2 * np.pi * np.e * (2 + 1 / 12)) / 2
    assert max(found) > 0.7 * qsgd_dense_code_length(dimension)
