"""Truncated and folded normals against mpmath quadrature with 25 digits."""

import mpmath
import numpy as np
import pytest
from scipy import stats

from hvd_adaptive.levels import Mixture, TruncatedNormal

# mu, sigma: ordinary, tiny, huge, and means 1 to 1e12 sigmas outside [-1, 1].
LAWS = [(0.0, 0.3), (-0.3, 1.0), (0.7, 0.05), (0.3, 1e-12), (-0.011, 1e-9), (1.0, 1e-6)]
LAWS += [(0.5, 1e6), (-3.0, 1e12), (1.5, 0.01), (-51.0, 1.0), (1.1, 1e-12), (-2.0, 1e-5)]


def relative_density(mu, sigma, t, start):
    """The density at t over that at ``start``."""
    return mpmath.exp(-((t - start) * (t + start - 2 * mu)) / (2 * sigma**2))


def reference(mu, sigma, low, high, power, folded=False, relative=False):
    """Integral of theta**power (|theta|**power) over [low, high] of the law, by quadrature;
    ``relative``: of the density that is 1 at its mode.

    The range is cut where the density falls below exp(-60) of its highest point there: the rest
    is not seen at any precision tested.
    """
    with mpmath.workdps(25):
        mu, sigma, a, b = map(mpmath.mpf, (mu, sigma, low, high))
        if a >= b:
            return 0.0
        peak, mode = min(max(mu, a), b), min(max(mu, -1), 1)
        slope = abs(peak - mu) / sigma
        reach = sigma * 120 / (slope + mpmath.sqrt(slope**2 + 120))
        left, right = max(a, peak - reach), min(b, peak + reach)
        # Short pieces for the quadrature; |t|**k turns at zero.
        knots = {left + (peak - left) * n / 4 for n in range(5)}
        knots |= {peak + (right - peak) * n / 4 for n in range(5)}
        knots = sorted(knots | ({mpmath.mpf(0)} if left < 0 < right else set()))
        # mpmath stops at an absolute error, so it is given values around one.
        size, width = max(abs(left), abs(right)), right - left

        def integrand(u):
            t = peak + u * width
            value = (abs(t) if folded else t) / size
            return value**power * relative_density(mu, sigma, t, peak)

        scaled = [(knot - peak) / width for knot in knots]
        total = mpmath.quad(integrand, scaled, method="gauss-legendre", maxdegree=4)
        total *= width * size**power * relative_density(mu, sigma, peak, mode)
        return total if relative else float(total / reference(mu, sigma, -1, 1, 0, relative=True))


def points(mu, sigma):
    """Points in the bulk, in the tails, near zero, and at the ends."""
    centre = np.clip(mu, -1, 1)
    scale = sigma * min(1.0, sigma / max(abs(mu) - 1, 1e-300))
    near = centre + scale * np.array([-6.0, -1.0, 0.5, 3.0])
    return np.unique(np.clip(np.concatenate([near, [-1.0, -0.4, 1e-7, 1.0]]), -1, 1))


@pytest.mark.parametrize(("mu", "sigma"), LAWS)
def test_truncated_normal_closed_forms(mu, sigma):
    law = TruncatedNormal(mu, sigma)
    x = points(mu, sigma)
    computed = law.moments(x)
    for power, values in enumerate(computed):
        expected = np.array([reference(mu, sigma, -1, t, power) for t in x])
        # A signed mean may pass through zero: 1e-8 of the integral of |theta|, too.
        spread = expected
        if power == 1:
            spread = np.array([reference(mu, sigma, -1, t, power, folded=True) for t in x])
        assert np.all(np.abs(values - expected) <= 1e-8 * spread + 1e-290), (power, x)
    np.testing.assert_array_equal(law.cdf(x), computed[0])


@pytest.mark.parametrize(("mu", "sigma"), LAWS)
def test_folded_closed_forms(mu, sigma):
    law = Mixture([mu], [sigma], [1.0])
    x = np.unique(np.abs(points(mu, sigma)))
    for power, values in enumerate(law.moments(x)):
        expected = np.array([reference(mu, sigma, -t, t, power, folded=True) for t in x])
        np.testing.assert_allclose(values, expected, rtol=1e-8, atol=1e-290)


@pytest.mark.parametrize(("mu", "sigma"), LAWS)
def test_pdf_integrates_to_cdf_differences(mu, sigma):
    law, folded = TruncatedNormal(mu, sigma), Mixture([mu], [sigma], [1.0])
    mass = reference(mu, sigma, -1, 1, 0, relative=True)
    with mpmath.workdps(25):
        mode = min(max(mpmath.mpf(mu), -1), 1)
        for t in points(mu, sigma)[1:-1]:
            expected = float(relative_density(mpmath.mpf(mu), mpmath.mpf(sigma), t, mode) / mass)
            np.testing.assert_allclose(law.pdf(t), expected, rtol=1e-8, atol=1e-290)
            if t > 0:
                mirrored = law.pdf(t) + law.pdf(-t)
                np.testing.assert_allclose(folded.pdf(t), mirrored, rtol=1e-12)
    assert law.pdf(1.0001) == law.pdf(-1.0001) == folded.pdf(-0.1) == 0


@pytest.mark.parametrize(("mu", "sigma"), LAWS)
def test_inverse_cdf(mu, sigma):
    y = np.array([0.0, 1e-6, 0.1, 0.5, 0.9, 0.999, 1.0])
    for law, low in ((TruncatedNormal(mu, sigma), -1.0), (Mixture([mu], [sigma], [1.0]), 0.0)):
        x = law.ppf(y)
        assert np.all((x >= low) & (x <= 1)) and np.all(np.diff(x) >= 0)
        assert np.all(law.cdf(x) >= y - 1e-15)
        below = np.nextafter(x, low - 1)
        strictly = x > low
        assert np.all(law.cdf(below)[strictly] < y[strictly])


def test_other_bounds_and_broadcasting():
    law = TruncatedNormal(np.array([0.1, 2.0]), np.array([0.5, 0.3]), 0.0, 3.0)
    x = np.array([[0.2], [1.0], [2.9]])
    assert law.cdf(x).shape == (3, 2)
    for column, (mu, sigma) in enumerate([(0.1, 0.5), (2.0, 0.3)]):
        other = stats.truncnorm(-mu / sigma, (3 - mu) / sigma, mu, sigma)
        np.testing.assert_allclose(law.cdf(x)[:, column], other.cdf(x[:, 0]), rtol=1e-10)
    np.testing.assert_allclose(law.cdf(3.0), 1.0, rtol=1e-12)


def test_zero_deviation_is_a_point():
    law = Mixture([-0.25], [0.0], [1.0])
    np.testing.assert_array_equal(law.cdf([0.2499, 0.2501]), [0.0, 1.0])
    np.testing.assert_allclose(law.moments(1.0)[1], 0.25, rtol=1e-9)


def test_mixture_is_the_weighted_sum():
    mu, sigma, weights = [0.0, 0.4, -2.0], [0.1, 1e-6, 0.3], [0.5, 0.125, 0.375]
    law = Mixture(mu, sigma, np.multiply(8, weights))
    alone = [Mixture([m], [s], [1.0]) for m, s in zip(mu, sigma, strict=True)]
    x = np.array([[1e-5, 0.05], [0.4, 0.9]])
    expected = np.tensordot(weights, [[*own.moments(x), own.pdf(x)] for own in alone], 1)
    np.testing.assert_allclose([*law.moments(x), law.pdf(x)], expected, rtol=1e-12)


def test_tabulated_mixture_keeps_the_masses():
    law = Mixture([0.0, 0.05, -0.02], [0.02, 1e-9, 0.01], [2.0, 1.0, 1.0])
    table = law.tabulate()
    # At the edges the table is exact, whatever its bins look like inside.
    np.testing.assert_allclose(table.cdf(table.edges), law.cdf(table.edges), atol=1e-12)
    assert table.zero_mass == table.one_mass == 0


@pytest.mark.parametrize(
    ("law", "arguments", "message"),
    [
        *((TruncatedNormal, (mu, 1.0), "mu") for mu in (np.nan, np.inf)),
        *((TruncatedNormal, (0.0, sigma), "sigma") for sigma in (np.nan, -1.0, np.inf)),
        (TruncatedNormal, (0.0, 1.0, 1.0, 1.0), "lower"),
        (Mixture, ([], [], []), "weights"),
        (Mixture, ([0.0], [1.0, 1.0], [1.0]), "weights"),
        *((Mixture, ([0.0], [1.0], [weight]), "weights") for weight in (0.0, -1.0, np.nan)),
    ],
)
def test_wrong_input(law, arguments, message):
    with pytest.raises(ValueError, match=message):
        law(*arguments)
