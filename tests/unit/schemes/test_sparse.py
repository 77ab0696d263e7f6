"""Sparse SGD: optimal probabilities, what is kept, lengths, broken bodies."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import scipy.optimize
import torch
import unit_oracles as oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import heavy, vector

from hvd_adaptive import PayloadError, SparseSGD
from hvd_adaptive.kernels.numba import sparse as cpu_sparse
from hvd_adaptive.kernels.sparse import most_words, rice_parameter

from oracle.laws import threshold  # isort: skip

BUCKET = 500
DENSITIES = (0.003, 0.05, 0.4, 1.0)


def optimal(sizes: np.ndarray, wanted: float) -> np.ndarray:
    """min(1, size/λ) with sum ``wanted``; all ones where so few are not zero."""
    return np.minimum(1, sizes / threshold(sizes, wanted / sizes.size))


def test_the_oracle_solves_the_convex_problem():
    """min Σ g²/p over 0 < p <= 1 with Σ p = wanted, by SLSQP."""
    for seed, wanted in ((0, 3.0), (1, 6.5), (2, 0.7)):
        sizes = np.abs(vector(heavy, 12, seed).double().numpy())
        sizes = sizes / sizes.max() + 0.01
        found = scipy.optimize.minimize(
            lambda p, s=sizes: (s**2 / p).sum(),
            np.full(12, wanted / 12),
            jac=lambda p, s=sizes: -((s / p) ** 2),
            bounds=[(1e-6, 1)] * 12,
            constraints={"type": "eq", "fun": lambda p, w=wanted: p.sum() - w},
            method="SLSQP",
            options={"maxiter": 2000, "ftol": 1e-14},
        )
        best = optimal(sizes, wanted)
        np.testing.assert_allclose(best.sum(), wanted, rtol=1e-9)
        np.testing.assert_allclose((sizes**2 / best).sum(), found.fun, rtol=1e-4)


@settings(max_examples=100)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
    st.floats(1e-6, 1.0),
)
def test_never_more_exact_values_than_the_density_allows(values, density):
    flat = torch.tensor(values, dtype=torch.float32)
    scheme = SparseSGD(density=density)
    payload = scheme.encode(flat, seed=3)
    assert 96 + scheme.parts.default.least_body_bytes(len(values)) <= payload.numel()
    assert payload.numel() <= scheme.parts.default.payloads.length(len(values), 0, torch.float32)
    _, exact, words = cpu_sparse.encode(flat.numpy(), len(values), density, 2, 5)
    assert exact.size <= density * len(values) * (1 + 1e-9)
    assert words.size <= most_words(len(values), 2)


def test_equal_coordinates_are_kept_as_they_are():
    flat = torch.zeros(1000)
    flat[::100] = torch.tensor([3.0, -3.0] * 5)
    scheme = SparseSGD(density=0.01)
    assert torch.equal(scheme.decode(scheme.encode(flat)), flat)


def test_a_threshold_that_rounding_makes_rise_is_the_last():
    """Below 1 lies more than 1, while all of it rounds to 2: it would rise and fall for ever."""
    flat = np.array([1.0, 0.5, 0.5, 2.0**-52], np.float32)
    lambdas, _, _ = cpu_sparse.encode(flat, 4, 0.5, 1, 1)
    assert 1 <= lambdas[0] < 1 + 2.0**-22


@pytest.mark.parametrize("density", DENSITIES)
def test_coordinates_are_kept_as_the_random_integers_say(density):
    flat = vector(heavy, 2 * BUCKET + 77)
    flat[::9] = 0
    scheme = SparseSGD(density=density, bucket_size=BUCKET)
    payload = scheme.encode(flat, seed=11)
    decoded = scheme.decode(payload).double().numpy()
    key = oracle.read_field(payload.numpy().tobytes(), "key")
    exact = flat.double().numpy()
    for b, part in enumerate(np.split(exact, [BUCKET, 2 * BUCKET])):
        p = optimal(np.abs(part), density * part.size)
        u = (np.array(oracle.uniform_integers(key, b, part.size)) + 0.5) / 2**24
        got = decoded[b * BUCKET : b * BUCKET + part.size]
        sure = np.abs(p - u) > 2e-7
        np.testing.assert_array_equal((got != 0)[sure], (p > u)[sure])
        kept = got != 0
        np.testing.assert_allclose(got[kept], (part[kept] / p[kept]), rtol=3e-7)


def test_the_rice_parameter_is_the_best():
    """Expected bits of geometric gaps, by summing: no k does better by more than a hundredth."""
    for density in (0.5, 0.2, 0.1, 0.03, 0.01, 0.001):
        gaps = np.arange(int(40 / density))
        chance = density * (1 - density) ** gaps
        bits = [((gaps >> k) * chance).sum() + k for k in range(20)]
        assert bits[rice_parameter(density)] <= min(bits) + 0.01
    assert rice_parameter(1.0) == 0 and rice_parameter(1e-300) == 29


def test_lies_about_exact_values_are_refused():
    scheme = SparseSGD(density=0.05, bucket_size=BUCKET)
    data = bytearray(scheme.encode(vector(heavy, 2 * BUCKET)).numpy().tobytes())
    assert struct.unpack_from("<q", data, 96)[0] > 1
    for count in (-1, 0, 1, 2**31, 2**40, -(2**63), 2**63 - 1):
        struct.pack_into("<q", data, 96, count)
        with pytest.raises(PayloadError):
            scheme.decode(oracle.forged(bytes(data)))


def told(stream: bytes, lambdas: np.ndarray, exact: list, n: int, k: int) -> np.ndarray | None:
    """The values of a stream, read bit by bit; None if it is not readable."""
    bits = "".join(map(str, np.unpackbits(np.frombuffer(stream, np.uint8), bitorder="little")))
    out, at, index, left = np.zeros(n, np.float32), 0, -1, list(exact)
    while (one := bits.find("1", at)) >= 0:
        gap, kind = bits[one + 1 : one + 1 + k], bits[one + 1 + k : one + 3 + k]
        index += (one - at << k) + int("0" + gap[::-1], 2) + 1
        full = kind[:1] == "1"
        if index >= n or len(kind) < 2 - full or (full and not left):
            return None
        limit = lambdas[index // 7]
        out[index] = left.pop(0) if full else -limit if kind == "01" else limit
        at = one + (2 if full else 3) + k
    return None if left else out


@settings(max_examples=200)
@given(st.binary(max_size=64), st.integers(1, 100), st.sampled_from((0, 1, 5, 29)))
def test_any_stream_is_read_as_told_and_within_bounds(stream, n, k):
    """Guards around the output stay as they were."""
    stream = stream[: len(stream) // 4 * 4]
    lambdas, exact = np.arange(1, 1 - (-n // 7), dtype=np.float32), [5.0, 6.0][: n % 3]
    sections = lambdas, np.array(exact, np.float32), np.frombuffer(stream, np.uint32).copy()
    guarded = np.full(n + 200, 77, np.float32)
    out = guarded[100 : 100 + n]
    out[:] = 0
    want = told(stream, lambdas, exact, n, k)
    assert cpu_sparse.add(*sections, 7, np.int64(k), out) == (want is not None)
    assert (guarded[:100] == 77).all() and (guarded[100 + n :] == 77).all()
    assert want is None or np.array_equal(out, want)
