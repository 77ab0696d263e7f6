"""QSVRG's epochs beside exact ones of the same picks: any seed passes, biased rounding fails."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hvd_adaptive.optim import QSVRG, Portion, theorem_parameters
from oracle.svrg import Epoch, Judged, LeastSquares, Recorder

N, RANKS, RIDGE = 12, 3, 0.5
INTERVALS = 4  # ⌈√12⌉


def portions(problem: LeastSquares, recorder: Recorder) -> list[Portion]:
    """Of 21, 20 and 20 functions."""

    def portion(rank: int) -> Portion:
        own = range(rank, problem.count, RANKS)

        def gradient(x: torch.Tensor, index: int | None) -> torch.Tensor:
            picked = own if index is None else [own[index]]
            found = np.mean([problem.gradient(j, x.numpy()) for j in picked], axis=0)
            return torch.from_numpy(found)

        return Portion(len(own), recorder.of_rank(rank, gradient))

    return [portion(rank) for rank in range(RANKS)]


@pytest.mark.parametrize("seed", range(3))
def test_epochs_differ_from_exact_ones_as_unbiased_rounding_lets_them(seed):
    problem = LeastSquares(61, N, RIDGE)
    recorder = Recorder(problem.count, RANKS)
    lr, iterations = theorem_parameters(1 + RIDGE, RIDGE)
    start = torch.zeros(N, dtype=torch.float64)
    run = QSVRG(start, portions(problem, recorder), lr=lr, iterations=iterations, seed=seed)
    for _ in range(3):
        begin, end = run.point.numpy().copy(), run.epoch().numpy()
        judged = Judged(problem, recorder.epoch(begin, end), lr, INTERVALS)
        judged.assert_unbiased()
        judged.assert_value(problem.value(end))


ROUNDINGS = {
    "as it should": lambda r, u: np.floor(r + u),
    "down": lambda r, u: np.floor(r),
    "up": lambda r, u: np.ceil(r),
    "to the nearest": lambda r, u: np.rint(r),
    "up too seldom": lambda r, u: np.floor(r + 0.8 * u),
    "up too often": lambda r, u: np.floor(r + np.minimum(1.25 * u, 0.999)),
}


def written_out(problem: LeastSquares, rounding, seed: int, lr: float, iterations: int) -> Epoch:
    """An epoch from 0, in NumPy alone."""
    generator = np.random.default_rng(seed)
    y = np.zeros(N)
    full = np.mean([problem.gradient(j, y) for j in range(problem.count)], axis=0)
    x, points, picks = y, [], []
    for _ in range(iterations):
        points.append(x)
        picks.append([])
        sent = []
        for rank in range(RANKS):
            own = range(rank, problem.count, RANKS)
            j = own[generator.integers(len(own))]
            share = RANKS * len(own) / problem.count
            v = share * (problem.gradient(j, x) - problem.gradient(j, y)) + full
            step = np.linalg.norm(v) / INTERVALS
            sent.append(np.sign(v) * rounding(np.abs(v) / step, generator.random(N)) * step)
            picks[-1].append(j)
        x = x - lr * np.mean(sent, axis=0)
    return Epoch(y, np.array(points), np.array(picks), np.mean(points, axis=0))


@pytest.mark.parametrize("name", ROUNDINGS)
def test_biased_rounding_is_found(name):
    """The right one passes for every seed, a wrong one fails for every seed."""
    problem = LeastSquares(61, N, RIDGE)
    lr, iterations = theorem_parameters(1 + RIDGE, RIDGE)
    for seed in range(3):
        epoch = written_out(problem, ROUNDINGS[name], seed, lr, 4 * iterations)
        judged = Judged(problem, epoch, lr, INTERVALS)
        if name == "as it should":
            judged.assert_unbiased()
            judged.assert_value(problem.value(epoch.end))
            continue
        with pytest.raises(AssertionError):
            judged.assert_unbiased()
