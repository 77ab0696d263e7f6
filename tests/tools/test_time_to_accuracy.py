"""benchmarks/time_to_accuracy.py: seconds to a quality from curves, and what its ranks train."""

from __future__ import annotations

import math

import pytest
import torch
from laboratory import curves, tasks


def curve(qualities, second=1.0):
    return [(10 * i, second * i, quality) for i, quality in enumerate(qualities)]


def test_seconds_are_linear_between_means_of_three_tests():
    rising = curve([0.0, 0.3, 0.6, 0.9, 0.9])
    # Means: 0, 0.15, 0.3, 0.6, 0.8.
    assert curves.seconds_to(rising, 0.3, True) == pytest.approx(2.0)
    assert curves.seconds_to(rising, 0.45, True) == pytest.approx(2.5)
    assert curves.seconds_to(rising, 0.81, True) is None
    falling = curve([-q for q in (0.0, 0.3, 0.6, 0.9, 0.9)], 2.0)
    assert curves.seconds_to(falling, -0.45, False) == pytest.approx(5.0)


def test_a_method_of_twice_the_speed_is_twice_as_fast():
    base = {seed: curve([0, 0.5 + seed / 100, 0.8, 0.9, 0.95], 4.0) for seed in range(3)}
    fast = {seed: [(n, s / 2, q) for n, s, q in own] for seed, own in base.items()}
    poor = {seed: [(n, s, q / 2) for n, s, q in own] for seed, own in base.items()}
    every = {"base": base, "fast": fast, "poor": poor}
    found = curves.summary(every, "base", 30, True, paired=False)
    target = sum((0.5 + seed / 100 + 0.8 + 0.9) / 3 for seed in range(3)) / 3
    assert found["base"].seconds == pytest.approx(curves.seconds_to(base[1], target, True))
    assert found["fast"].ratio == pytest.approx((2.0, 2.0, 2.0))
    assert (found["fast"].reached, found["poor"].reached) == (3, 0)
    assert found["poor"].ratio is None and found["poor"].seconds is None
    assert found["fast"].step == pytest.approx(0.2)


def test_each_seed_has_the_baselines_quality_as_its_target():
    """Seeds whose baseline ends worse need less; the mean of all would leave them without."""
    base = {seed: curve([0, 0.5, 0.5 + seed, 0.5 + seed], 4.0) for seed in range(3)}
    fast = {seed: [(n, s / 2, q) for n, s, q in own] for seed, own in base.items()}
    better = {seed: [(n, s, q + 0.1 * seed) for n, s, q in own] for seed, own in base.items()}
    every = {"base": base, "fast": fast, "better": better}
    found = curves.summary(every, "base", 30, True)
    assert [found[label].reached for label in every] == [3, 3, 3]
    assert found["fast"].ratio == pytest.approx((2.0, 2.0, 2.0))
    assert found["fast"].apart == (0, 0)
    assert curves.summary(every, "base", 30, True, paired=False)["base"].reached < 3
    # By hand: 0, 0.1, 0.2 have the mean 0.1 and the deviation 0.1.
    assert found["better"].apart == pytest.approx((0.1, 4.302653 * 0.1 / math.sqrt(3)))


def test_curves_at_another_speed():
    """Seconds a step are the median of the timed runs', which have to learn the same."""
    known = {seed: curve([0.0, 0.4 + seed / 10, 0.8], 99.0) for seed in range(3)}
    timed = {seed: curve([0.0, 0.4 + seed / 10], 5.0 + seed) for seed in range(3)}
    found = curves.at_speed(known, timed)
    assert found[1] == [(0, 0.0, 0.0), (10, 6.0, 0.5), (20, 12.0, 0.8)]
    with pytest.raises(ValueError, match=r"seed 2, step 10: quality 0\.7 here, 0\.6 there"):
        curves.at_speed(known, timed | {2: curve([0.0, 0.7], 5.0)})


def test_intervals_are_students():
    """By hand: t of two degrees of freedom is 4.303."""
    logs = [math.log(x) for x in (1.0, 2.0, 4.0)]
    half = 4.302653 * math.log(2) / math.sqrt(3)
    assert curves.interval(logs) == pytest.approx((2.0, 2 * math.exp(-half), 2 * math.exp(half)))


@pytest.mark.parametrize("name", tasks.TASKS)
def test_ranks_draw_the_same_data_in_every_run_and_other_data_than_others(name):
    task = tasks.TASKS[name]
    model = task.model(1)
    assert all(map(torch.equal, model.parameters(), task.model(1).parameters()))
    losses = {
        (rank, step): float(task.data(1, rank, 4).loss(model, step).detach())
        for rank in range(2)
        for step in range(2)
    }
    assert len(set(losses.values())) == 4
    assert float(task.data(1, 1, 4).loss(model, 1).detach()) == losses[1, 1]


def test_a_run_of_float32_learns():
    task = tasks.TASKS["mnist"]
    untrained = tasks.tuned(task, task.rate, 0, 0, 4)
    assert untrained < 0.3 < 0.6 < tasks.tuned(task, task.rate, 0, 25, 4)
