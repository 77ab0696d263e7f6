"""AMQ's multiplier against brute force, quadrature and finite differences."""

import itertools

import numpy as np
import pytest
from levels_oracles import LAWS

from hvd_adaptive.levels import Histogram, expected_variance, exponential_magnitudes, fit_multiplier
from hvd_adaptive.levels.fit import multiplier_gradient


def of_powers(p: float, count: int, symmetric: bool) -> np.ndarray:
    """p**s, ..., p, 1 of ``count`` levels, the first of which is 0 unless symmetric."""
    zero = [] if symmetric else [0.0]
    return np.array([*zero, *(p ** np.arange(count - 1 - len(zero), -1, -1))])


@pytest.mark.many
@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize(
    ("count", "symmetric"), [(2, True), (8, True), (128, True), (3, False), (4, False), (32, False)]
)
def test_no_multiplier_on_a_fine_scan_is_better(name, count, symmetric):
    law = LAWS[name]
    fitted = fit_multiplier(law, count, symmetric)
    powers = count - (1 if symmetric else 2)
    scan = np.linspace(max(1e-3, 2.0 ** (-96 / powers)), 0.9995, 1000)
    tables = np.stack([of_powers(p, count, symmetric) for p in scan])
    assert fitted.objective <= np.min(expected_variance(tables, law, symmetric)) * (1 + 1e-3)
    assert 0 < fitted.magnitudes[-2] < 1
    wanted = of_powers(fitted.magnitudes[-2], count, symmetric)
    np.testing.assert_allclose(fitted.magnitudes, wanted)
    value = expected_variance(wanted, law, symmetric)
    np.testing.assert_allclose(fitted.objective, value, rtol=1e-4)


def test_a_zero_based_table_of_two_levels_has_no_multiplier():
    for law in LAWS.values():
        fitted = fit_multiplier(law, 2, symmetric=False)
        assert fitted.magnitudes.tolist() == [0, 1]
        assert multiplier_gradient(0.3, law, 2, symmetric=False) == 0
        value = expected_variance([0.0, 1.0], law, False)
        np.testing.assert_allclose(fitted.objective, value, rtol=1e-4)


@pytest.mark.many
@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("count", [2, 4, 16])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gradient_against_central_differences(name, count, symmetric):
    law = LAWS[name]

    def psi(p: float) -> float:
        return float(expected_variance(exponential_magnitudes(count, p, symmetric), law, symmetric))

    for p in (0.2, 0.5, 0.85):
        step = 1e-5
        numeric = (psi(p + step) - psi(p - step)) / (2 * step)
        exact = multiplier_gradient(p, law, count, symmetric)
        assert abs(numeric - exact) < 1e-3 * max(abs(exact), psi(p), 1e-6)


def test_all_mass_in_one_bin_and_at_one():
    laws = Histogram.from_samples([0.3]), Histogram.from_samples([1.0])
    for law, symmetric in itertools.product(laws, (True, False)):
        fitted = fit_multiplier(law, 4, symmetric)
        assert np.all(np.diff(fitted.magnitudes) > 0) and np.isfinite(fitted.objective)
