"""Lloyd-Max levels of N(0, 1): their two conditions by quadrature, and their error."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_adaptive.levels.lloyd_max import distortion, normal_levels

NODES, WEIGHTS = np.polynomial.legendre.leggauss(60)


def integral(power: int, lower: float, upper: float, about: float = 0.0) -> float:
    """Integrate (z - about)**power times the density of N(0, 1) by Gauss and Legendre."""
    ends = np.linspace(max(lower, -12.0), min(upper, 12.0), 9)
    z = (ends[1:, None] + ends[:-1, None]) / 2 + np.diff(ends)[:, None] / 2 * NODES
    values = (z - about) ** power * np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)
    return float((np.diff(ends)[:, None] / 2 * WEIGHTS * values).sum())


def edges_of(levels: np.ndarray) -> np.ndarray:
    return np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]])


def squared_error(levels: np.ndarray) -> float:
    edges = edges_of(levels)
    cells = zip(edges[:-1], edges[1:], levels, strict=True)
    return sum(integral(2, a, b, about=level) for a, b, level in cells)


@pytest.mark.parametrize("bits", range(1, 9))
def test_each_level_is_the_mean_of_its_cell(bits):
    """No other levels satisfy this, since the density is log-concave, so these are the best."""
    levels = normal_levels(bits)
    assert len(levels) == 2**bits and (np.diff(levels) > 0).all()
    np.testing.assert_array_equal(levels, -levels[::-1])
    for a, b, level in zip(edges_of(levels)[:-1], edges_of(levels)[1:], levels, strict=True):
        assert integral(1, a, b) / integral(0, a, b) == pytest.approx(level, abs=1e-11)
    assert distortion(levels) == pytest.approx(squared_error(levels), rel=1e-9)
