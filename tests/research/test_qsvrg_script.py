"""research/qsvrg.py: over Horovod and in one process it ends at the same bits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from script_runs import MPIRUN, ROOT, png_size, run

pytestmark = [pytest.mark.integration, pytest.mark.parallel, pytest.mark.timeout(200)]

SCRIPT = str(ROOT / "research" / "qsvrg.py")
FLAGS = ["--epochs", "2", "--convexity", "0.25", "--png", "picture.png", "--seed", "7"]


def line(output: str, start: str) -> str:
    (only,) = (found for found in output.splitlines() if found.strip().startswith(start))
    return only.strip()


def test_one_process_and_two_ranks_agree_to_the_bit(tmp_path: Path) -> None:
    points = []
    for command in (
        [sys.executable, SCRIPT, "--simulate", "--ranks", "2"],
        [*MPIRUN, sys.executable, SCRIPT],
    ):
        done = run([*command, *FLAGS], tmp_path, 150)
        assert done.returncode == 0, done.stdout
        assert "QSVRG, 2 ranks, n = 31, s = 6" in done.stdout
        points.append(line(done.stdout, "point "))
        excess = [float(line(done.stdout, f"│     {p} │").split("│")[2]) for p in range(3)]
        assert excess[1] < 0.1 * excess[0] and excess[2] < 0.1 * excess[1]
        assert png_size(tmp_path / "picture.png")[0] > 1000
        (tmp_path / "picture.png").unlink()
    assert points[0] == points[1]
