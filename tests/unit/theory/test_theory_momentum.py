"""ALQ Theorems 7 and 8 against real quantized runs with momentum."""

from __future__ import annotations

import numpy as np
import pytest
from theory_runs import (
    CHANGING,
    STEPS,
    AbsoluteValues,
    Logistic,
    Wells,
    epsilon_of,
    mean_and_error,
    train,
)

from hvd_adaptive.theory import momentum_convex, momentum_nonconvex

MOMENTA = pytest.mark.parametrize(
    ("momentum", "lookahead"),
    [(0.0, 0.0), (0.9, 0.0), (0.9, 1.0), (0.5, 2.0)],
    ids=["plain", "heavy-ball", "nesterov", "sgd"],
)


def given(problem, momentum, lookahead):
    return {
        "iterations": STEPS,
        "momentum": momentum,
        "lookahead": lookahead,
        "initial_gap": problem.value(problem.start) - problem.least,
        "gradient_bound": problem.gradient_bound,
        "epsilon": epsilon_of(CHANGING, problem.dimension),
        "processors": 4,
    }


def trained(problem, step_size, **momentum):
    own = {"tables": CHANGING, "processors": 4, "project": False}
    return train(problem, steps=STEPS, step_size=step_size, **own, **momentum)


@MOMENTA
@pytest.mark.parametrize(
    ("make", "step", "slack"), [(Logistic, 0.5, 250), (AbsoluteValues, 0.05, 30)]
)
def test_momentum_convex_holds(make, step, slack, momentum, lookahead):
    """Theorem 7, 4 processors, at 5 standard errors; within ``slack`` of what was reached."""
    problem = make()
    alpha = step * (1 - momentum)
    promise = momentum_convex(
        **given(problem, momentum, lookahead),
        step_size=alpha,
        distance=np.linalg.norm(problem.start - problem.best),
        second_moment=problem.second_moment_everywhere,
    )
    path = trained(problem, alpha, momentum=momentum, lookahead=lookahead)
    gap, error = mean_and_error(problem.value(path.mean(axis=0)) - problem.least)
    assert gap + 5 * error <= promise.bound <= slack * gap, (gap, error, promise)


@MOMENTA
@pytest.mark.parametrize("constant", (20.0, 200.0))
def test_momentum_nonconvex_holds(constant, momentum, lookahead):
    """Theorem 8: the mean over the iterates (not just the least) keeps it; within 3000."""
    problem = Wells()
    promise = momentum_nonconvex(
        **given(problem, momentum, lookahead),
        smoothness=problem.smoothness,
        step_constant=constant * (1 - momentum),
        second_moment=problem.second_moment,
        variance=problem.variance,
    )
    path = trained(problem, promise.step_size, momentum=momentum, lookahead=lookahead)
    squares = np.square(problem.gradient(path)).sum(axis=-1)
    found, error = mean_and_error(squares.mean(axis=0))
    assert found + 5 * error <= promise.bound <= 3000 * found, (found, error, promise)


BY_HAND = {"iterations": 99, "initial_gap": 5.0, "gradient_bound": 1.0, "bits": 8.0}


def test_theorem_7_by_hand():
    """mu = 3/4, l = 2, alpha = 1/10, T + 1 = 100; V^2 + (1 + epsilon) B/M = 1 + 4 = 5."""
    own = {"momentum": 0.75, "lookahead": 2.0, "step_size": 0.1, "distance": 3.0}
    promise = momentum_convex(**BY_HAND, **own, second_moment=4.0, epsilon=1.0, processors=2)
    terms = 0.75 * 5 / (0.25 * 100), 0.25 * 9 / (2 * 0.1 * 100), 0.1 * (1 + 3) * 5 / (2 * 0.25)
    np.testing.assert_allclose(promise.bound, sum(terms))
    assert promise.total_bits == 99 * 8.0


def test_heavy_ball_is_torchs_momentum():
    import torch

    problem = Logistic()
    w = torch.zeros(problem.dimension, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.3, momentum=0.9)
    problem.sample = lambda rng, w, processors: problem.gradient(w)[:, None]
    path = train(problem, steps=30, step_size=0.3, momentum=0.9, project=False, runs=1)
    for expected in path[1:, 0]:
        w.grad = torch.from_numpy(problem.gradient(w.detach().numpy()))
        optimizer.step()
        np.testing.assert_allclose(w.detach().numpy(), expected, atol=1e-12)


def test_theorem_8_by_hand():
    """mu = 1/2, l = 0, L = 1, C = 1, T + 1 = 100: alpha = min(1/4, 1/10)."""
    own = {"momentum": 0.5, "smoothness": 1.0, "step_constant": 1.0}
    promise = momentum_nonconvex(**BY_HAND, **own, second_moment=4.0, epsilon=1.0, processors=2)
    assert promise.step_size == 0.1
    spread = 1 * (0.25 * 1 + 0.25) * (1 + 2 * 4 / 2)
    np.testing.assert_allclose(promise.bound, 2 * 5 * 0.5 / (0.1 * 100) + spread / (0.125 * 10))
