"""Averages of epsilon_Q and N_Q along a run."""

from __future__ import annotations

import numpy as np
import pytest
from theory_oracles import exponential, uniform

from hvd_adaptive.theory import RunAverages, Segment, code_length_bound, variance_bound


def test_averages_are_those_of_every_step():
    run = RunAverages()
    plan = [(uniform(1), 100), (exponential(2), 250), (exponential(6), 1)]
    per_step = []
    for table, steps in plan:
        bounds = variance_bound(table, 512), code_length_bound(table, 512)
        run.add(steps, *bounds)
        per_step += [bounds] * steps
    assert run.steps == 351
    np.testing.assert_allclose([run.variance_bound, run.code_length], np.mean(per_step, axis=0))
    np.testing.assert_allclose(run.total_bits, np.sum(per_step, axis=0)[1])


def test_one_table_is_its_own_average():
    run = RunAverages([Segment(7, 0.3, 1000.0)])
    assert (run.variance_bound, run.code_length, run.total_bits) == (0.3, 1000.0, 7000.0)


def test_averages_are_exact_for_long_runs():
    run = RunAverages()
    for _ in range(10_000):
        run.add(1, 0.1, 0.1)
    assert run.variance_bound == 0.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1.0), "steps=0: must be a whole number >= 1"),
        ((1.5, 1.0), "steps=1.5"),
        ((1, -1.0), "variance_bound=-1.0"),
        ((1, float("inf")), "variance_bound=inf: must be a finite number >= 0"),
        ((1, 1.0, float("nan")), "code_length=nan"),
    ],
)
def test_wrong_segments(arguments, message):
    run = RunAverages()
    with pytest.raises(ValueError, match=message):
        run.add(*arguments)
    assert run.steps == 0
    with pytest.raises(ValueError, match="segments: must not be empty"):
        _ = run.variance_bound
