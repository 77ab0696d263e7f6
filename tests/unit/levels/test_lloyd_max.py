"""Lloyd-Max levels of N(0, 1): their two conditions by quadrature, and their error."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import integrate

from hvd_adaptive.levels.lloyd_max import distortion, normal_levels


def integral(power: int, lower: float, upper: float, about: float = 0.0) -> float:
    """Integrate (z - about)**power times the density of N(0, 1)."""

    def integrand(z: float) -> float:
        return (z - about) ** power * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)

    return integrate.quad(integrand, lower, upper, epsabs=0, epsrel=1e-12)[0]


@pytest.mark.parametrize("bits", range(1, 9))
def test_each_level_is_the_mean_of_its_cell(bits):
    """No other levels satisfy this, since the density is log-concave, so these are the best."""
    levels, error = normal_levels(bits), 0.0
    assert len(levels) == 2**bits and (np.diff(levels) > 0).all()
    np.testing.assert_array_equal(levels, -levels[::-1])
    edges = [-np.inf, *((levels[1:] + levels[:-1]) / 2), np.inf]
    for (a, b), level in zip(itertools.pairwise(edges), levels, strict=True):
        assert integral(1, a, b) / integral(0, a, b) == pytest.approx(level, abs=1e-11)
        error += integral(2, a, b, about=level)
    assert distortion(levels) == pytest.approx(error, rel=1e-9)
