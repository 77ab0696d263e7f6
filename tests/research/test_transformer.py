"""research/transformer.py: its runs by both doors, on a tiny model; its table."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from script_runs import ROOT

METHODS = ["fsdp/float32", "fsdp/EDEN(bits=4)", "ddp/float32", "ddp/ALQ(bits=3)"]
STEPS = 8
# Both ranks of all methods: the script's own function, for a smaller model and a shorter text.
RANKS = """
import os, sys, fsdp2
import transformer_runs as runs
from pathlib import Path
fsdp2.WIDTH = 32
runs.TESTED, runs.RATE = 8, 0.01
folder, steps, *methods = sys.argv[1:]
train, test, characters = runs.texts()
runs.texts = lambda: (train[:400], train[:1000], characters)
child = os.fork()
made = [runs.Run(method, 0, int(steps)) for method in methods]
runs.work(int(child == 0), made, Path(folder), folder)
sys.exit(os.waitpid(child, 0)[1] if child else 0)
"""


@pytest.mark.parallel
@pytest.mark.timeout(120)
def test_both_doors_train(monkeypatch, tmp_path):
    """Exact averages by two doors agree; codes are near them, and not the same."""
    import transformer_runs

    command = [sys.executable, "-c", "import sys; sys.path[:0] = sys.argv[1:3]; del sys.argv[1:3]"]
    command[-1] += RANKS
    command += [str(ROOT / "research"), str(ROOT / "examples"), str(tmp_path), str(STEPS), *METHODS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    monkeypatch.setattr(transformer_runs, "TESTED", 8)
    monkeypatch.setattr(transformer_runs, "RATE", 0.01)
    figures = [transformer_runs.Run(method, 0, STEPS).load(tmp_path) for method in METHODS]
    losses, bits = ([one[name] for one in figures] for name in ("test_loss", "bits_per_coordinate"))
    assert losses[0] == pytest.approx(losses[2], rel=1e-4)
    assert losses[0] < math.log(transformer_runs.texts()[2]) - 0.5  # better than by chance
    for code, exact in zip(losses[1::2], losses[::2], strict=True):
        assert code != exact and code == pytest.approx(exact, rel=0.1)
    assert bits[0] == bits[2] == 32 and 4 < bits[1] < 6 and 3 < bits[3] < 5
    assert transformer_runs.Run(METHODS[0], 0, STEPS + 1).load(tmp_path) is None


def test_differences_are_paired():
    """Seeds differ by 1, and each code's loss is 0.5 above float32's of its seed."""
    import transformer_page
    from transformer_runs import Run

    found = {
        Run(method, seed, 1): {
            "test_loss": seed + (0.0 if method.endswith("float32") else 0.5),
            "bits_per_coordinate": 4.0,
        }
        for method in transformer_page.METHODS
        for seed in (2, 0, 1)
    }
    table = {row[0]: row[1:] for row in transformer_page.rows(found)}
    assert table["ddp/float32"] == ("4.00", "1.0000", "1.0000", "-")
    assert table["ddp/ALQ(bits=3)"][3] == "+0.5000 (+0.5000 to +0.5000)"
    page = transformer_page.page("python research/transformer.py", found)
    assert "| `fsdp/EDEN(bits=2)` | 4.00 | 1.5000 | 1.0000 |" in page
