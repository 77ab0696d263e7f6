"""A run that is stopped and goes on in new processes equals the one that was not, bit for bit."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from launch import ROOT, Launcher, run

SECONDS = 120
RANKS = 2


def trained(folder: Path, part: str) -> dict[tuple[str, str], str]:
    """Hashes of parameters and residuals by case and rank."""
    command = [sys.executable, str(ROOT / "tests/parallel/ranks/resume.py"), str(folder), part]
    done = run(Launcher(RANKS, "mpirun"), command, SECONDS)
    assert done.returncode == 0, done.stdout
    found = re.findall(r"case=(\S+) rank=(\d) step=7 hash=([0-9a-f]{64})", done.stdout)
    assert len(found) == RANKS * 5, done.stdout
    return {(case, rank): digest for case, rank, digest in found}


@pytest.mark.parallel
@pytest.mark.timeout(2 * SECONDS + 20)
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path):
    """Level tables, code books, second stages, retries, rate control, residuals, changed
    settings."""
    assert trained(tmp_path, "whole") == trained(tmp_path, "rest")
