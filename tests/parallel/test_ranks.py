"""Run the rank tests (tests/parallel/ranks) under each launcher.

By hand: mpirun -np 2 python -m pytest -o python_files="check_*.py" tests/parallel/ranks
"""

from __future__ import annotations

import os
import sys

import pytest
from script_runs import ROOT, run

from hvd_adaptive.tools.launch import Ranks

# A check that hangs is ended in its rank, with every thread's stack, and with it the launch; the
# launch's own limit is for what hangs outside of checks.
CHECK_SECONDS, SECONDS = 180, 3600 if "HVD_ADAPTIVE_EVERY_CASE" in os.environ else 1800
CHECKS = ROOT / "tests/parallel/ranks"
pytestmark = [pytest.mark.parallel, pytest.mark.timeout(SECONDS + 30)]


def check(ranks: Ranks, words: list[str], *options: str) -> None:
    """Every check passes on every rank; a hang is killed and fails.

    words: pytest's, options: Python's.
    """
    command = [sys.executable, *options, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    for setting in (f"timeout={CHECK_SECONDS}", "timeout_method=thread", "python_files=check_*.py"):
        command += ["-o", setting]
    told = run(ranks.command([*command, *words]), ROOT, SECONDS)
    # Every rank must have run to its end, not only the last one to print.
    assert told.count(" passed") == ranks.count and " failed" not in told, told


@pytest.mark.parametrize(("launcher", "ranks"), [("mpi", 2), ("gloo", 2), ("mpi", 4)])
def test_ranks(launcher: str, ranks: int) -> None:
    check(Ranks(ranks, launcher), [str(CHECKS)])


@pytest.mark.thorough
def test_threads() -> None:
    """Gradients from several threads, in Python's development mode: no race, no warning of Python's
    own; malloc's debug hooks see no overrun."""
    words = [str(CHECKS / "check_threads.py"), "-W", "error::ResourceWarning"]
    check(Ranks(2, "gloo"), words, "-X", "dev")
