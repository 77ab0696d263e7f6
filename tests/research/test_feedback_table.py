"""research/feedback.py on short runs: a line for each scheme, whose cells are as the page says;
research/feedback_decay.py: runs that are rescaled equal the others until the rate falls."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn")
pytestmark = [pytest.mark.integration, pytest.mark.timeout(330)]

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.thorough
def test_the_table():
    words = [sys.executable, "research/feedback.py", "--seeds", "2", "--steps", "20"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    head, _, *lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert "loss, `'auto'`" in head and "deficit, `None`" in head
    cells = {line.split("`")[1]: [c.strip() for c in line.split("|")[2:-1]] for line in lines}
    biased = ["BinGrad()", 'BinGrad(variant="biased")', "SignSGD()", "OneBitSGD()"]
    assert list(cells)[1:5] == biased
    for name, (none, classical, auto, *deficits) in cells.items():
        biased = "SGD()" in name or "BinGrad" in name
        assert len(deficits) == 3 and float(none) > 0
        if biased:
            assert float(auto) < float(none) and float(classical) < float(none)
        else:  # an error above 1
            assert classical == "2 of 2 raise" or float(classical) > float(auto)
    assert "2 of 2 raise" in done.stdout
    assert "float32: loss " in done.stdout.splitlines()[-1]


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
