"""Run the rank tests (tests/parallel/ranks) under each launcher.

By hand: mpirun -np 2 python -m pytest -o python_files="check_*.py" tests/parallel/ranks
"""

from __future__ import annotations

import sys

import pytest
from launch import LAUNCHERS, Launcher, run

# A check that hangs is ended in its rank, with every thread's stack, and with it the launch; the
# launch's own limit is for what hangs outside of checks.
CHECK_SECONDS, SECONDS = 180, 1800


@pytest.mark.parallel
@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize("launcher", LAUNCHERS, ids=str)
def test_ranks(launcher: Launcher) -> None:
    """Every check passes on every rank; a hang is killed and fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    for setting in (f"timeout={CHECK_SECONDS}", "timeout_method=thread", "python_files=check_*.py"):
        command += ["-o", setting]
    command.append("tests/parallel/ranks")
    done = run(launcher, command, SECONDS)
    assert done.returncode == 0, done.stdout
    # Every rank must have run to its end, not only the last one to print.
    assert done.stdout.count(" passed") == launcher.ranks, done.stdout
    assert " failed" not in done.stdout, done.stdout
