"""What rounding may change in an epoch of QSVRG (QSGD paper, section 3.3), by exact laws.

The epoch's picks and points are recorded. The same picks without rounding give the exact epoch.
QSGD (section 3.1) sends ±‖v‖ k/s for v_j, and k is s|v_j|/‖v‖ rounded down or up, so that its mean
is v_j. So the noise e_t of update t, given all before it, has the mean 0 and a known variance. Sums
of w_t·e_t are martingales for weights w_t that do not depend on the noise from t on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from oracle.bounds import FIVE_SIGMA, deviation

Vector = np.ndarray


@dataclasses.dataclass
class Epoch:
    """Recorded: y at its begin; x of each of T updates; the functions that the K ranks picked, (T,
    K) in terms of the problem; y at its end."""

    begin: Vector
    points: np.ndarray
    picks: np.ndarray
    end: Vector


class Recorder:
    """What the ranks' gradient functions are called with in an epoch.

    The gradients are asked for with a rank's index of a function at x, then with the same one at y;
    with None for the mean of all, which is not recorded.
    """

    def __init__(self, count: int, ranks: int) -> None:
        self._count, self._ranks = count, ranks
        self._points: list[Vector] = []
        self._picks: list[list[int]] = []

    def of_rank(self, rank: int, gradient: Callable[..., Any]) -> Callable[..., Any]:
        """The rank's function, recorded. Rank 0 comes first in each update."""
        own, at_x = range(rank, self._count, self._ranks), True

        def recorded(x: Any, index: int | None) -> Any:
            nonlocal at_x
            if index is not None:
                if at_x and rank == 0:
                    self._points.append(x.numpy().copy())
                    self._picks.append([])
                if at_x:
                    self._picks[-1].append(own[index])
                at_x = not at_x
            return gradient(x, index)

        return recorded

    def epoch(self, begin: Vector, end: Vector) -> Epoch:
        """All since the last one, from ``begin`` to ``end``, the mean of the points."""
        epoch = Epoch(begin, np.array(self._points), np.array(self._picks), end)
        np.testing.assert_allclose(end, epoch.points.mean(0), rtol=1e-12)
        self._points, self._picks = [], []
        return epoch


class LeastSquares:
    """f = mean of f_j = (a_j·x - b_j)²/2 + ridge ‖x‖²/2, rows a_j of length 1. Ranks hold the
    functions in turn: rank i has every K-th one from i on. smoothness: of f."""

    def __init__(self, rows: int, n: int, ridge: float) -> None:
        generator = np.random.default_rng(0)
        a = generator.standard_normal((rows, n))
        self.a, self.b = (
            a / np.linalg.norm(a, axis=1, keepdims=True),
            generator.standard_normal(rows),
        )
        self.ridge, self.count, self.smoothness = ridge, rows, 1 + ridge

    def value(self, x: Vector) -> float:
        return float(((self.a @ x - self.b) ** 2).mean() / 2 + self.ridge / 2 * x @ x)

    def gradient(self, j: int, x: Vector) -> Vector:
        return self.a[j] * (self.a[j] @ x - self.b[j]) + self.ridge * x

    def hessian(self, j: int) -> np.ndarray:
        return np.outer(self.a[j], self.a[j]) + self.ridge * np.eye(self.a.shape[1])


class Judged:
    """An epoch beside the one with the same picks that rounds nothing.

    moved: the mean of its points less the exact one's, which is linear in the noise.
    """

    def __init__(self, problem: LeastSquares, epoch: Epoch, lr: float, intervals: int) -> None:
        self.problem, self.epoch, self.lr, self.intervals = problem, epoch, lr, intervals
        self._updates = self._epochs_updates()
        self.exact = self._exact_points().mean(0)
        self._noise()
        self._weights = self._response()
        self.moved = epoch.points.mean(0) - self.exact

    def _epochs_updates(self) -> Callable[[int, Vector], list[Vector]]:
        """Of each rank at update t, for an x: K m_i/m (∇f_j(x) - ∇f_j(y)) + ∇f(y)."""
        problem, y, picks = self.problem, self.epoch.begin, self.epoch.picks
        ranks = picks.shape[1]
        full = np.mean([problem.gradient(j, y) for j in range(problem.count)], axis=0)
        held = [len(range(rank, problem.count, ranks)) for rank in range(ranks)]
        self._shares = [ranks * count / problem.count for count in held]

        def updates(t: int, x: Vector) -> list[Vector]:
            own = zip(self._shares, picks[t], strict=True)
            return [w * (problem.gradient(j, x) - problem.gradient(j, y)) + full for w, j in own]

        return updates

    def _exact_points(self) -> np.ndarray:
        x, points = self.epoch.begin.copy(), []
        for t in range(len(self.epoch.points)):
            points.append(x)
            x = x - self.lr * np.mean(self._updates(t, x), axis=0)
        return np.array(points)

    def _noise(self) -> None:
        """Of the updates whose effect was recorded, all but the last, which moves no point that
        counts: noise, variances and the largest values, (T - 1, n); means of what was rounded."""
        points, s = self.epoch.points, self.intervals
        sent = (points[:-1] - points[1:]) / self.lr
        vectors = np.array([self._updates(t, x) for t, x in enumerate(points[:-1])])
        steps = np.linalg.norm(vectors, axis=2, keepdims=True) / s
        up = np.abs(vectors) / steps % 1.0
        ranks, chance = vectors.shape[1], up * (1 - up)
        self.means = vectors.mean(1)
        self.noise = sent - self.means
        own = steps**2 * chance / ranks**2  # each rank's share of the variance
        self.variances = own.sum(1)
        fourth = (steps / ranks) ** 4 * chance * (1 - 3 * chance)
        # Of the squared noise: Var e² = E e⁴ - (E e²)² for a sum of independent terms.
        self.variances_of_squares = (fourth - 3 * own**2).sum(1) + 2 * self.variances**2
        self.reaches = np.broadcast_to(steps.max(1) / ranks, self.noise.shape)
        self.most = steps.mean(1)

    def _response(self) -> np.ndarray:
        """B_t with moved = -η/T Σ B_t e_t, (T - 1, n, n).

        D_{t+1} = A_t D_t - η e_t with A_t = 1 - η mean_i w_i ∇²f_j, so that
        B_t = 1 + A_{t+1} + A_{t+2} A_{t+1} + … up to the last point: B_t = 1 + B_{t+1} A_{t+1}.
        """
        n, found = self.epoch.begin.size, []
        after = np.zeros((n, n))
        for t in range(len(self.epoch.points) - 1, 0, -1):
            of_ranks = zip(self._shares, self.epoch.picks[t], strict=True)
            hessian = np.mean([w * self.problem.hessian(j) for w, j in of_ranks], axis=0)
            step = np.eye(n) - self.lr * hessian
            after = np.eye(n) + after @ step
            found.append(after)
        return np.array(found[::-1])

    def bound(self, weights: np.ndarray) -> float:
        """Of |Σ w_t·e_t|, weights (T - 1, n)."""
        return freedman(weights**2 * self.variances, np.abs(weights) * self.reaches)

    def assert_unbiased(self) -> None:
        """Neither towards zero (or away), nor in what any coordinate of y comes to; and as noisy as
        unbiased rounding to these levels is, which has the least variance that there is."""
        sizes = self.most**2
        towards = self.means / sizes
        found = float((towards * self.noise).sum())
        assert abs(found) < self.bound(towards), (found, self.bound(towards))
        excess = float(((self.noise**2 - self.variances) / sizes).sum())
        allowed = freedman(self.variances_of_squares / sizes**2, self.most**2 / sizes)
        assert abs(excess) < allowed, (excess, allowed)
        scale = self.lr / len(self.epoch.points)
        for j, found in enumerate(self.moved):
            assert abs(found) < scale * self.bound(self._weights[:, j]), (j, found)

    def assert_value(self, value: float) -> float:
        """f at the end is the exact epoch's within what rounding may change; returns that.

        f(ȳ) - f(x̄) is ∇f(x̄)·moved and at most smoothness/2 ‖moved‖² more.
        """
        slope = np.mean(
            [self.problem.gradient(j, self.exact) for j in range(self.problem.count)], axis=0
        )
        allowed = self.lr / len(self.epoch.points) * self.bound(slope @ self._weights)
        allowed += self.problem.smoothness / 2 * float(self.moved @ self.moved)
        changed = value - self.problem.value(self.exact)
        assert abs(changed) < allowed, (changed, allowed)
        return allowed


def freedman(variances: np.ndarray, reaches: np.ndarray) -> float:
    """How far from 0 a sum of martingale differences may be.

    variances: conditional ones, or more.  reaches: no difference is larger.

    Freedman (1975): Bernstein's bound holds while conditional variances sum up to at most V. They
    depend on the noise themselves. So it is used for 100 powers of two as V at once, one of which
    is at most twice the sum.
    """
    return deviation(2 * float(variances.sum()), float(reaches.max()), FIVE_SIGMA / 100)
