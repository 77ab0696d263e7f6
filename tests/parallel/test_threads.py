"""Gradients from several threads, in Python's development mode."""

from __future__ import annotations

import sys

import pytest
from launch import Launcher, run

SECONDS = 120


@pytest.mark.parallel
@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize("launcher", [Launcher(2, "mpirun"), Launcher(2, "gloo")], ids=str)
def test_threads(launcher: Launcher) -> None:
    """No race, no warning of Python's own; malloc's debug hooks see no overrun."""
    command = [
        sys.executable, "-X", "dev", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
        "-W", "error::ResourceWarning", "-o", "timeout=60", "tests/parallel/ranks/threaded.py",
    ]  # fmt: skip
    done = run(launcher, command, SECONDS)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(" passed") == launcher.ranks, done.stdout
