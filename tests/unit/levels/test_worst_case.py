"""Tables until the first fit: their error on buckets that are made to be bad."""

from __future__ import annotations

import numpy as np
import pytest
from exact_errors import relative_error

from hvd_adaptive import ALQ, AMQ
from hvd_adaptive.levels.worst_case import safe_magnitudes

BUCKET = 8192
# Largest relative error of 3 to 8 bits, as docs/choosing.md says.
LIMITS = {3: 2.1, 4: 0.3, 5: 0.08, 6: 0.02, 7: 0.005, 8: 0.0015}


def bad_vectors(size: int) -> list[np.ndarray]:
    """One coordinate of 1 and n equal ones of size t, and laws of coordinates from light to heavy
    tails; (size,) each."""
    vectors = []
    for n in {1, 3, 30, min(300, size - 1), size - 1}:
        for t in np.geomspace(1e-6, 1, 60):
            vectors.append(np.concatenate([[1.0], np.full(n, t), np.zeros(size - 1 - n)]))
    rng = np.random.default_rng(1)
    vectors += [rng.standard_normal(size), rng.laplace(size=size), np.ones(size)]
    vectors += [rng.standard_t(1.5, size), np.exp(2 * rng.standard_normal(size))]
    return vectors


def worst(positive: np.ndarray, symmetric: bool, norm: str, size: int = BUCKET) -> float:
    """The largest relative error over ``bad_vectors`` of a table with these positive levels."""
    zero = [] if symmetric else [0.0]
    levels = np.concatenate([-positive[::-1], zero, positive])
    return max(relative_error(v, levels, size, norm) for v in bad_vectors(size))


@pytest.mark.many
@pytest.mark.parametrize("norm", ("l2", "linf"))
@pytest.mark.parametrize("symmetric", (True, False))
@pytest.mark.parametrize("bits", LIMITS)
def test_an_unfitted_table_is_safe(bits, symmetric, norm):
    levels = ALQ(bits=bits, symmetric=symmetric, norm=norm).levels.numpy()
    assert len(levels) == 2**bits - (not symmetric)
    assert worst(levels[levels > 0], symmetric, norm) <= LIMITS[bits]


@pytest.mark.parametrize("symmetric", (True, False))
def test_amqs_too(symmetric):
    amq, alq = AMQ(bits=3, symmetric=symmetric), ALQ(bits=3, symmetric=symmetric)
    assert amq.levels.tolist() == alq.levels.tolist()


@pytest.mark.parametrize("size", (64, 1024))
@pytest.mark.parametrize(("bits", "symmetric"), [(2, True), (3, False), (5, False)])
def test_no_other_exponential_table_is_much_safer(bits, symmetric, size):
    count = 2 ** (bits - 1)
    powers = np.arange(count - 1, -1 if symmetric else 0, -1.0)

    def of(p: float) -> float:
        return worst(np.append(p ** powers[:-1], 1.0), symmetric, "l2", size)

    found = np.array(safe_magnitudes(count, symmetric, size))
    least = min(of(p) for p in np.geomspace(0.01, 0.95, 25))
    assert worst(found[found > 0], symmetric, "l2", size) <= 1.25 * least


def test_the_table_is_exponential_and_the_same_on_all_processors():
    """Its multiplier is a sum of few powers of two, and its products are rounded as IEEE says."""
    for bits in range(2, 9):
        for symmetric in (True, False):
            for size in (1, 2, 100, BUCKET, 10**6):
                table = safe_magnitudes(2 ** (bits - 1), symmetric, size)
                positive = [m for m in table if m > 0]
                p = positive[-2] if len(positive) > 1 else 1.0
                product = 1.0
                for level in reversed(positive):
                    assert level == product
                    product *= p
                assert (p * 256).is_integer() and (table[0] == 0) == (not symmetric)
