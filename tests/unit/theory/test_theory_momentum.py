"""ALQ Theorems 7 and 8 against real quantized runs with momentum."""

from __future__ import annotations

import numpy as np
import pytest
from theory_oracles import exponential, uniform
from theory_runs import AbsoluteValues, Logistic, Wells, mean_and_error, train

from hvd_adaptive.theory import RunAverages, momentum_convex, momentum_nonconvex, variance_bound

STEPS = 300
PLANS = {
    "ternary": [(uniform(1), STEPS)],
    "changing": [(uniform(1), 30), (exponential(2), 120), (exponential(6), 150)],
}
MOMENTA = pytest.mark.parametrize(
    ("momentum", "lookahead"),
    [(0.0, 0.0), (0.9, 0.0), (0.9, 1.0), (0.5, 2.0)],
    ids=["plain", "heavy-ball", "nesterov", "sgd"],
)


def epsilon(plan, dimension):
    run = RunAverages()
    for table, steps in plan:
        run.add(steps, variance_bound(table, dimension))
    return run.variance_bound


@MOMENTA
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(
    ("make", "step", "slack"), [(Logistic, 0.5, 250), (AbsoluteValues, 0.05, 30)]
)
def test_momentum_convex_holds(make, step, slack, name, momentum, lookahead):
    """Theorem 7, 4 processors, at 5 standard errors; within ``slack`` of what was reached."""
    problem, plan = make(), PLANS[name]
    alpha = step * (1 - momentum)
    promise = momentum_convex(
        iterations=STEPS,
        momentum=momentum,
        lookahead=lookahead,
        step_size=alpha,
        distance=np.linalg.norm(problem.start - problem.best),
        initial_gap=problem.value(problem.start) - problem.least,
        gradient_bound=problem.gradient_bound,
        second_moment=problem.second_moment_everywhere,
        epsilon=epsilon(plan, problem.dimension),
        processors=4,
    )
    path = train(
        problem,
        steps=STEPS,
        step_size=alpha,
        tables=plan,
        processors=4,
        project=False,
        momentum=momentum,
        lookahead=lookahead,
    )
    gap, error = mean_and_error(problem.value(path.mean(axis=0)) - problem.least)
    assert gap + 5 * error <= promise.bound <= slack * gap, (gap, error, promise)


@MOMENTA
@pytest.mark.parametrize("name", PLANS)
def test_momentum_nonconvex_holds(name, momentum, lookahead):
    """Theorem 8: the mean over the iterates (not just the least) keeps it; within 3000."""
    problem, plan = Wells(), PLANS[name]
    for constant in (20.0, 200.0):
        promise = momentum_nonconvex(
            iterations=STEPS,
            momentum=momentum,
            lookahead=lookahead,
            smoothness=problem.smoothness,
            step_constant=constant * (1 - momentum),
            initial_gap=problem.value(problem.start),
            gradient_bound=problem.gradient_bound,
            second_moment=problem.second_moment,
            variance=problem.variance,
            epsilon=epsilon(plan, problem.dimension),
            processors=4,
        )
        path = train(
            problem,
            steps=STEPS,
            step_size=promise.step_size,
            tables=plan,
            processors=4,
            project=False,
            momentum=momentum,
            lookahead=lookahead,
        )
        squares = np.square(problem.gradient(path)).sum(axis=-1)
        found, error = mean_and_error(squares.mean(axis=0))
        assert found + 5 * error <= promise.bound <= 3000 * found, (found, error, promise)


def test_without_momentum_the_classical_bound():
    """R^2/(2 alpha T) + alpha G^2/2 over T + 1 iterates."""
    promise = momentum_convex(
        iterations=99,
        momentum=0,
        step_size=0.1,
        distance=2.0,
        initial_gap=5.0,
        gradient_bound=1.0,
        second_moment=3.0,
        variance=2.0,
        bits=8.0,
    )
    np.testing.assert_allclose(promise.bound, 4 / (2 * 0.1 * 100) + 0.1 * 3 / 2)
    assert promise.total_bits == 99 * 8.0


def test_theorem_7_by_hand():
    """mu = 3/4, l = 2, alpha = 1/10, T + 1 = 100; V^2 + (1 + epsilon) B/M = 1 + 4 = 5."""
    promise = momentum_convex(
        iterations=99,
        momentum=0.75,
        lookahead=2.0,
        step_size=0.1,
        distance=3.0,
        initial_gap=5.0,
        gradient_bound=1.0,
        second_moment=4.0,
        epsilon=1.0,
        processors=2,
    )
    terms = 0.75 * 5 / (0.25 * 100), 0.25 * 9 / (2 * 0.1 * 100), 0.1 * (1 + 3) * 5 / (2 * 0.25)
    np.testing.assert_allclose(promise.bound, sum(terms))


def test_plain_sgd_in_two_ways():
    """l = 1/(1 - mu) is plain SGD with step alpha/(1 - mu): the same iterates."""
    problem = Logistic()
    runs = [
        train(problem, steps=50, step_size=0.2, momentum=0.5, lookahead=2.0, project=False),
        train(problem, steps=50, step_size=0.4, project=False),
    ]
    np.testing.assert_allclose(runs[0], runs[1], atol=1e-12)


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
    promise = momentum_nonconvex(
        iterations=99,
        momentum=0.5,
        smoothness=1.0,
        step_constant=1.0,
        initial_gap=2.0,
        gradient_bound=1.0,
        second_moment=4.0,
        epsilon=1.0,
        processors=2,
    )
    assert promise.step_size == 0.1
    spread = 1 * (0.25 * 1 + 0.25) * (1 + 2 * 4 / 2)
    np.testing.assert_allclose(promise.bound, 2 * 2 * 0.5 / (0.1 * 100) + spread / (0.125 * 10))


BASE = {
    "iterations": 10,
    "momentum": 0.5,
    "initial_gap": 1.0,
    "gradient_bound": 1.0,
    "second_moment": 1.0,
}
CONVEX, NONCONVEX = {"step_size": 0.1, "distance": 1.0}, {"smoothness": 1.0, "step_constant": 1.0}


@pytest.mark.parametrize(
    ("function", "extra"),
    [(momentum_convex, CONVEX), (momentum_nonconvex, NONCONVEX)],
    ids=["convex", "nonconvex"],
)
def test_monotone_and_wrong_input(function, extra):
    start = function(**BASE | extra)
    for better in ({"processors": 4}, {"variance": 0.1}, {"initial_gap": 0.5}):
        assert function(**BASE | extra | better).bound < start.bound
    for worse in ({"epsilon": 1.0}, {"gradient_bound": 2.0}):
        assert function(**BASE | extra | worse).bound > start.bound
    for name, value in [
        ("iterations", 0),
        ("momentum", 1.0),
        ("momentum", -0.1),
        ("initial_gap", -1),
        ("gradient_bound", -1),
        ("second_moment", -1),
        ("epsilon", -1),
        ("processors", 0),
        ("lookahead", -1),
        ("bits", -1),
        *((key, -1) for key in extra),
    ]:
        with pytest.raises(ValueError, match=f"^{name}={value}"):
            function(**BASE | extra | {name: value})
