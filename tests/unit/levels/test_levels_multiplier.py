"""AMQ's multiplier against brute force and finite differences."""

import numpy as np
import pytest
from levels_oracles import LAWS

from hvd_adaptive.levels import (
    Histogram,
    expected_variance,
    exponential_magnitudes,
    fit_multiplier,
)
from hvd_adaptive.levels.multiplier import multiplier_gradient


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("count", [2, 4, 8, 32, 128])
def test_no_multiplier_on_a_fine_scan_is_better(name, count):
    law = LAWS[name]
    fitted = fit_multiplier(law, count)
    scan = np.linspace(max(1e-3, 2.0 ** (-96 / (count - 1))), 0.9995, 3000)
    tables = np.stack([exponential_magnitudes(count, p, True) for p in scan])
    assert fitted.objective <= np.min(expected_variance(tables, law, True)) * (1 + 1e-3)
    assert 0 < fitted.multiplier < 1
    np.testing.assert_allclose(fitted.magnitudes, fitted.multiplier ** np.arange(count - 1, -1, -1))


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
    for law in (Histogram.from_samples([0.3]), Histogram.from_samples([1.0])):
        fitted = fit_multiplier(law, 4)
        assert np.all(np.diff(fitted.magnitudes) > 0) and np.isfinite(fitted.objective)
