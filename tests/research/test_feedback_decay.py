"""research/feedback_decay.py: runs that are rescaled equal the others until the rate falls."""

from __future__ import annotations

import argparse

import pytest

pytest.importorskip("sklearn")
pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


def losses(steps: int, rescales: bool) -> float:
    import feedback_decay

    own = {"rate": 0.1, "steps": steps, "workers": 2, "batch_size": 16, "bucket_size": 8192}
    return feedback_decay.trained(argparse.Namespace(**own), 0, "OneBitSGD()", rescales).loss


def test_only_the_fall_makes_a_difference(monkeypatch):
    """The last loss of 10 steps comes before any step at another rate if that falls after 9."""
    assert losses(10, False) != pytest.approx(losses(10, True), rel=1e-5)
    import feedback_decay

    monkeypatch.setattr(feedback_decay, "FALLS_AFTER", 0.9)
    assert losses(10, False) == pytest.approx(losses(10, True), rel=1e-6)
