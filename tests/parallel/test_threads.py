"""Gradients from several threads, in Python's development mode."""

from __future__ import annotations

import sys

import pytest
from launch import Launcher, run

SECONDS, RANKS = 300, 2


@pytest.mark.thorough
@pytest.mark.parallel
@pytest.mark.timeout(SECONDS + 30)
def test_threads() -> None:
    """No race, no warning of Python's own; malloc's debug hooks see no overrun. (Without this mode
    they are among the rank checks of every launch.)"""
    command = [sys.executable, "-X", "dev", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["-W", "error::ResourceWarning", "-o", "timeout=180"]
    command.append("tests/parallel/ranks/check_threads.py")
    done = run(Launcher(RANKS, "gloo"), command, SECONDS)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(" passed") == RANKS, done.stdout
