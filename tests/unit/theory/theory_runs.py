"""Problems with known constants, and quantized data-parallel SGD on them, many runs at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import optimize
from theory_oracles import exponential, quantize, uniform

from hvd_adaptive.theory import RunAverages, variance_bound

STEPS = 300
CHANGING = [(uniform(1), 30), (exponential(2), 120), (exponential(6), 150)]


def epsilon_of(plan, dimension):
    """The average over a plan's steps; no plan: exact."""
    run = RunAverages()
    for table, steps in plan:
        run.add(steps, variance_bound(table, dimension))
    return run.variance_bound if plan else 0.0


@dataclass
class Logistic:
    """Logistic regression, labels 60% random; one sample a gradient, ||x|| = 1 for each.

    On the ball ||w|| <= R |x w| <= R, so a gradient is at most 1/(1 + exp(-R)) long.
    """

    dimension: int = 5
    radius: float = 3.0

    def __post_init__(self):
        rng = np.random.default_rng(0)
        x = rng.standard_t(3, size=(200, self.dimension))
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        labels = np.where(rng.random(200) < 0.6, rng.choice([-1, 1], 200), np.sign(x[:, 0]))
        self.x = x * labels[:, None]
        self.start = np.zeros(self.dimension)
        self.smoothness = np.linalg.norm(self.x.T @ self.x / 200, 2) / 4
        self.second_moment = (1 + np.exp(-self.radius)) ** -2
        self.second_moment_everywhere = 1.0
        # sup over |s| <= 1 of ||x^T s||/n, on all of R^d.
        self.gradient_bound = np.linalg.norm(self.x, 2) / np.sqrt(200)
        found = optimize.minimize(self.value, self.start, jac=self.gradient, tol=1e-12)
        self.best, self.least = found.x, float(found.fun)
        assert np.linalg.norm(self.best) < self.radius

    def value(self, w):
        return np.logaddexp(0, -(w @ self.x.T)).mean(axis=-1)

    def gradient(self, w):
        return -(1 / (1 + np.exp(w @ self.x.T))) @ self.x / 200

    def sample(self, rng, w, processors):
        x = self.x[rng.integers(0, 200, (len(w), processors))]
        margin = np.einsum("rd,rmd->rm", w, x)
        return -x / (1 + np.exp(margin))[..., None]


@dataclass
class AbsoluteValues:
    """f = sum a_j |w_j - c_j|, not smooth; gradients with a coordinate's sign flipped at times."""

    dimension: int = 8
    flips: float = 0.2

    def __post_init__(self):
        self.slopes = 0.5 ** np.arange(self.dimension)
        self.best = np.random.default_rng(1).uniform(-1, 1, self.dimension)
        self.start = np.zeros(self.dimension)
        self.radius, self.least = 1.5 * float(np.linalg.norm(self.best)), 0.0
        # A flip of probability p scales the mean by 1 - 2 p: the gradients are divided by it.
        self.second_moment = float(self.slopes @ self.slopes) / (1 - 2 * self.flips) ** 2
        self.second_moment_everywhere = self.second_moment
        self.gradient_bound = float(np.linalg.norm(self.slopes))

    def value(self, w):
        return np.abs(w - self.best) @ self.slopes

    def gradient(self, w):
        return np.sign(w - self.best) * self.slopes

    def sample(self, rng, w, processors):
        g = np.repeat(self.gradient(w)[:, None], processors, axis=1) / (1 - 2 * self.flips)
        return np.where(rng.random(g.shape) < self.flips, -g, g)


@dataclass
class Wells:
    """f = mean of u^2/(1 + u^2), u = w - c: smooth, not convex, gradients bounded; noise of +-1/2.

    Per coordinate |f'| <= 3 sqrt(3)/8 and |f''| <= 2.
    """

    dimension: int = 16

    def __post_init__(self):
        self.best = np.random.default_rng(2).normal(size=self.dimension)
        self.start, self.least = np.zeros(self.dimension), 0.0
        self.smoothness = 2 / self.dimension
        self.gradient_bound = 3 * np.sqrt(3) / 8 / np.sqrt(self.dimension)
        self.noise = 0.5 / self.dimension
        self.variance = self.dimension * self.noise**2
        self.second_moment = self.gradient_bound**2 + self.variance

    def value(self, w):
        u = np.square(w - self.best)
        return (u / (1 + u)).mean(axis=-1)

    def gradient(self, w):
        u = w - self.best
        return 2 * u / (1 + u * u) ** 2 / self.dimension

    def sample(self, rng, w, processors):
        g = np.repeat(self.gradient(w)[:, None], processors, axis=1)
        return g + self.noise * rng.choice([-1.0, 1.0], g.shape)


def train(
    problem,
    *,
    steps,
    step_size,
    tables=(),
    processors=1,
    runs=40,
    project=True,
    momentum=0.0,
    lookahead=0.0,
    seed=0,
):
    """Iterates (steps + 1, runs, d). tables: (magnitudes, steps) one after another; none: exact."""
    rng = np.random.default_rng(seed)
    plan = [magnitudes for magnitudes, count in tables for _ in range(count)]
    assert not plan or len(plan) == steps
    w = np.tile(problem.start, (runs, 1))
    path, ahead = [w], w
    for t in range(steps):
        g = problem.sample(rng, w, processors)
        if plan:
            g = quantize(rng, g, plan[t])[1]
        g = g.mean(axis=1)
        moved, ahead_next = w - step_size * g, w - lookahead * step_size * g
        # Eq. 45; y'_0 = w_0.
        w = moved + momentum * (ahead_next - ahead)
        ahead = ahead_next
        if project:
            offset = w - problem.start
            length = np.linalg.norm(offset, axis=1, keepdims=True)
            w = problem.start + offset * np.minimum(1, problem.radius / np.maximum(length, 1e-300))
        path.append(w)
    return np.array(path)


def mean_and_error(values):
    """Mean over runs and its standard error."""
    return values.mean(), values.std(ddof=1) / np.sqrt(values.size)


def sparsified(z: np.ndarray, gamma: float, estimator: str, rng) -> np.ndarray:
    """Keep each coordinate with probability 1/(γ + 1). Scaled up it is unbiased and its error is
    exactly γ ||z||²; as it is, it is the estimate at α = 1/(γ + 1)."""
    kept = z * (rng.random(z.shape) < 1 / (gamma + 1))
    return kept * (gamma + 1) if estimator == "unbiased" else kept
