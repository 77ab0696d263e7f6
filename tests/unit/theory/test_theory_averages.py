"""Averages of epsilon_Q and N_Q along a run."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_adaptive.theory import RunAverages, Segment


def test_averages_are_those_of_every_step():
    run = RunAverages([Segment(100, 0.3, 1000.0)])
    run.add(250, 0.1)
    run.add(1, 7.0, 5.0)
    per_step = [(0.3, 1000.0)] * 100 + [(0.1, 0.0)] * 250 + [(7.0, 5.0)]
    assert run.steps == 351
    np.testing.assert_allclose([run.variance_bound, run.code_length], np.mean(per_step, axis=0))
    assert run.total_bits == 100_005
    assert RunAverages([Segment(1, 0.1, 0.1)] * 10_000).variance_bound == 0.1


def test_averages_of_nothing():
    with pytest.raises(ValueError, match="steps=0"):
        RunAverages().add(0, 1.0)
    with pytest.raises(ValueError, match="segments: must not be empty"):
        _ = RunAverages().variance_bound
