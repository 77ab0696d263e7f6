"""Run the rank tests (tests/parallel/ranks) under each launcher.

By hand: mpirun -np 2 python -m pytest -o python_files="check_*.py" tests/parallel/ranks
"""

from __future__ import annotations

import sys

import pytest
from launch import LAUNCHERS, ROOT, Launcher, run

SECONDS = 300
CHECKS = sorted(path.name for path in (ROOT / "tests/parallel/ranks").glob("check_*.py"))


@pytest.mark.parallel
@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize("launcher", LAUNCHERS, ids=str)
def test_ranks(launcher: Launcher) -> None:
    """Every check passes on every rank; a hang is killed and fails."""
    command = [
        sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
        "-o", "python_files=check_*.py", "-o", "timeout=60", "tests/parallel/ranks",
    ]  # fmt: skip
    done = run(launcher, command, SECONDS)
    assert done.returncode == 0, done.stdout
    # Every rank must have run to its end, not only the last one to print.
    assert done.stdout.count(" passed") == launcher.ranks, done.stdout
    assert " failed" not in done.stdout, done.stdout
