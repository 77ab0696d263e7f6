"""error_feedback="auto": β of each part from the measured error, and residuals that outgrow."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from feedback_steps import OneRank, after, gradients
from simulated_steps import take_step
from torch import nn

from hvd_adaptive import ALQ, QSGD, OneBitSGD, ResidualError, SparseSGD
from hvd_adaptive.feedback_weight import (
    FOLLOWS,
    LIMIT,
    MARGIN,
    PATIENCE,
    Figures,
    Weights,
    largest_ratio,
)
from hvd_adaptive.simulate import Ranks, evaluate, train

WORKERS = 3


# Lemma 4 for an error and a weight of each step --------------------------------------------------


def moving_errors(steps: int) -> np.ndarray:
    """γ of each step: it stays, falls at once, and rises again by less than a doubling of 1 + γ."""
    t = np.arange(steps)
    return np.where(t < 60, 9.0, 0.5) + 8.0 * np.clip((t - 120) / 40, 0, 1)


def test_residuals_stay_bounded_while_the_error_moves():
    """A quantiser that keeps a coordinate with probability p, divided by p, has γ = 1/p - 1 for
    every z. Residuals, drawn here, follow the recursion of Lemma 4 and stay below its bound."""
    steps, n, generator = 240, 20_000, np.random.default_rng(1)
    gammas, weights = moving_errors(steps), Weights("auto")
    r, squares, expected, betas = np.zeros(n), [], [0.0], []
    for gamma in gammas:
        beta, g = weights.of(""), generator.standard_normal(n)
        z = g + beta * r
        keep = 1 / (1 + gamma)
        r = (1 - beta) * r + z - np.where(generator.random(n) < keep, z / keep, 0.0)
        squares.append(np.square(r).mean())
        expected.append(((1 - beta) ** 2 + beta**2 * gamma) * expected[-1] + gamma)
        betas.append(beta)
        weights, _ = after(weights, gamma)
    found, recursion = np.array(squares), np.array(expected[1:])
    late = slice(5, None)  # the mean of n draws is not far from its expectation
    assert np.abs(found[late] / recursion[late] - 1).max() < 0.2
    used = np.array(betas[1:])
    assert (used <= 1 / (1 + gammas[:-1]) + 1e-12).all(), "never above the last step's best"
    assert recursion.max() < gammas.max() / used.min()
    assert found.max() < 1.2 * gammas.max() / used.min()
    assert recursion[59] == pytest.approx(9 * 10, rel=0.02)  # constant errors: Eq. 17


def test_weights_fall_at_once_and_rise_slowly():
    weights = Weights("auto")
    assert weights.of("") == 0
    for error, expected in (
        (1.0, 0.5),
        (3.0, 0.25),
        (1.0, 0.25 + FOLLOWS * 0.25),
        (1.0, 0.25 + 0.25 * (1 - (1 - FOLLOWS) ** 2)),
        (9.0, 0.1),
        (None, 0.1),
    ):
        weights, _ = after(weights, error)
        assert weights.of("") == pytest.approx(expected)


# What ranks agree on ------------------------------------------------------------------------------


def ranks_of(compressor, **sizes: int) -> Ranks:
    named = [(name, nn.Parameter(torch.zeros(size))) for name, size in sizes.items()]
    return Ranks(named, compressor, WORKERS)


def step(ranks: Ranks, number: int, scales=(1.0,) * WORKERS) -> None:
    """Every rank has gradients of its own."""
    sizes = [parameter.numel() for parameter in ranks.parameters]
    own = [
        [scale * gradient for gradient in gradients(sizes, 10 * number + rank)]
        for rank, scale in enumerate(scales)
    ]
    take_step(ranks, number, ranks.parameters, own)


def test_ranks_that_differ_agree_after_a_step():
    """As if one rank had loaded another state: all take the least of all weights."""
    known = [Weights("auto", {"": 0.3}), Weights("auto", {"": 0.1}), Weights("auto")]
    errors = [{"": (error, 1.0)} for error in (1.0, 2.0, 6.0)]
    rows = [weights.row(1.0, 1.0, own) for weights, own in zip(known, errors, strict=True)]
    figures = Figures.of([""], rows)
    best = 1 / (1 + 9 / 3)
    for weights in known:
        assert weights.after(1.0, figures).of("") == 0.1 + (best - 0.1) * FOLLOWS
    unmeasured = [weights.row(1.0, 1.0, {"": (0.0, 0.0)}) for weights in known]
    figures = Figures.of([""], unmeasured)
    assert {weights.after(1.0, figures).of("") for weights in known} == {0.1}


def test_parts_have_weights_of_their_own():
    compressor = QSGD(
        bits=2, bucket_size=100, min_numel=20, error_feedback="auto", parameter_bits={"fine": 8}
    )
    ranks = ranks_of(compressor, coarse=2000, fine=2000, full=5)
    for number in range(3):
        step(ranks, number)
    for residuals in ranks.residuals:
        adapted = residuals.weights.adapted
        assert sorted(adapted) == ["", "bits=8"]
        assert adapted[""] < 0.2 and adapted["bits=8"] > 0.9
        assert residuals._weight_of(ranks.layout.pieces_of[0][0][0]) in adapted.values()
    state = ranks.residuals[0].state_dict()
    assert state["feedback_weights"] == adapted


def test_a_change_of_settings_keeps_residuals_and_begins_anew():
    rank = OneRank(QSGD(bits=2, bucket_size=100, error_feedback=0.1), [2000])
    rank.step(gradients([2000], 0))
    before = rank.residuals()["a"]
    rank.compressor.set(error_feedback="auto", bits=3)
    assert torch.equal(rank.residuals()["a"], before)
    rank.compressor.set(bits=2)
    rank.step(gradients([2000], 1))
    assert 0 < rank.compressor._training.residuals.weights.of("") < 0.3
    rank.compressor.set(error_feedback=0.7)
    assert rank.compressor._training.residuals.weights.of("") == 0.7
    rank.compressor.set(error_feedback=None)
    assert rank.compressor._training.residuals is None
    assert "residuals" not in rank.compressor.state_dict()


# Residuals that outgrow the gradients (of one rank: tests/feedback_doors.py) ----------------------


def digits_run(feedback, bucket_size: int = 8192) -> float:
    """Loss on the 8x8 digits after 80 steps of SGD at 0.1 by two ranks, of 2-bit ALQ as in the
    paper. Raises ResidualError after checking that no loss was worse than at the start."""
    from sklearn.datasets import load_digits

    images, targets = load_digits(return_X_y=True)
    x, y = torch.tensor(images).float() / 16, torch.tensor(targets)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    compressor = ALQ(
        bits=2, norm="l2", symmetric=True, error_feedback=feedback, bucket_size=bucket_size
    )
    keywords = {"workers": 2, "steps": 80, "batch_size": 64, "progress": False}
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    try:
        train(model, (x, y), optimizer=optimizer, compressor=compressor, **keywords)
    except ResidualError:
        assert evaluate(model, x, y)[0] < 2.5
        raise
    return evaluate(model, x, y)[0]


@pytest.mark.parametrize("bucket_size", (8192, 1024))
def test_two_bits_of_alq_do_not_diverge(bucket_size):
    """With β = 1 the loss would be 1e27 after these steps (1e22 in small buckets, where gradients
    grow as fast as residuals)."""
    with pytest.raises(ResidualError, match=r"error_feedback=1\.0: .*use error_feedback='auto'"):
        digits_run(1.0, bucket_size)
    plain = digits_run(None, bucket_size)
    assert digits_run("auto", bucket_size) < 1.05 * plain < 1.4


def steady(ratio: float, error: float, steps: int = 40) -> Weights:
    """Weights after steps of gradients of norm 1 and residuals of norm ``ratio``."""
    weights = Weights("auto")
    for _ in range(steps):
        weights, outgrown = after(weights, error, residual=ratio)
        expected = {0: ratio} if ratio > largest_ratio(error) else {}
        assert outgrown == pytest.approx(expected)
    return weights


@pytest.mark.parametrize("error", (0.01, 0.99, 1.0, 3000.0))
def test_what_lemma_4_allows_is_no_error(error):
    """At the best β ‖r‖² is γ (1 + γ) ‖g‖² on average, or γ/(√(γ + 1) - √γ)² for a contraction."""
    assert largest_ratio(error) >= LIMIT
    allowed = math.sqrt(error * (1 + error))
    if error < 1:
        gamma = error / (1 - error)
        allowed = math.sqrt(gamma) / (math.sqrt(gamma + 1) - math.sqrt(gamma))
    assert largest_ratio(error) >= MARGIN * allowed
    steady(allowed, error)
    steady(1.01 * largest_ratio(error), error)


def test_small_gradients_of_some_steps_are_no_growth():
    """A batch without a loss, a spike, an overflow: gradients of before count."""
    weights = steady(50.0, 0.5)
    for gradient, residual in ((0.0, 50.0), (1e-12, 50.0), (1.0, 50.0), (1e6, 900.0), (1.0, 900.0)):
        weights, outgrown = after(weights, 0.5, gradient, residual)
        assert not outgrown
    for gradient in (math.inf, math.nan):
        unknown, outgrown = after(weights, None, gradient, math.nan)
        assert unknown == weights and not outgrown
        assert not after(weights, None, gradient, math.inf)[1]
    assert after(weights, None, 1.0, math.inf)[1] == {0: math.inf}


def test_gradients_that_grow_with_residuals_are_no_measure():
    """β = 1 and an error of 2: both grow by √2 a step, and their ratio stays below the limit."""
    weights = Weights(1.0)
    for number in range(60):
        grown = math.sqrt(2) ** number
        weights, outgrown = after(weights, 2.0, grown, 10 * grown)
        if outgrown:
            break
    # 10 √2^t > 100 times the norm before the growth was noticed, √2^(PATIENCE - 1).
    assert number == pytest.approx(PATIENCE - 1 + 2 * math.log2(10), abs=1)


def test_a_residual_that_shrinks_is_no_error():
    """As after loading: what is held is large, and less remains after each step."""
    rank = OneRank(OneBitSGD(bucket_size=100, min_numel=0, error_feedback=1.0), [2000])
    rank.step(gradients([2000], 0))
    state = rank.compressor.state_dict()
    state["residuals"]["parameters"]["a"] *= 1e5
    del state["residuals_checksum"]
    rank.compressor.load_state_dict(state)
    for number in range(1, 4):
        rank.step(gradients([2000], number))
    assert float(rank.residuals()["a"].norm()) > LIMIT * math.sqrt(2000)


@pytest.mark.parametrize("density", (0.1, 0.001))
def test_sparse_gradients_with_auto_raise_nothing(density):
    """γ is about 1/density: residuals are as many times the gradient."""
    compressor = SparseSGD(density=density, bucket_size=2000, min_numel=0, error_feedback="auto")
    rank = OneRank(compressor, [8000])
    for number in range(60):
        rank.step(gradients([8000], number))
    assert 0 < compressor._training.residuals.weights.of("") < 2 * density
