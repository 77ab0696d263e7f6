"""Horovod started, ended and started again; subsets of ranks; unlike processors: programs of
lifecycle.py, launched on their own."""

from __future__ import annotations

import sys

import pytest
from launch import ROOT, Launcher, run

SECONDS = 180  # unlike processors compile kernels anew, the first time
CASES = [
    (("shutdown_and_init", "closed"), Launcher(2, "mpirun"), {}),
    (("subsets", "static_process_sets"), Launcher(4, "mpirun"), {}),
    (("alone",), Launcher(1, "mpirun"), {}),
    (("alone",), Launcher(1, "mpirun"), {"HOROVOD_ELASTIC": "1"}),
    (("unlike_processors",), Launcher(2, "mpirun"), {}),
]


@pytest.mark.parallel
@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize(
    ("programs", "launcher", "variables"),
    CASES,
    ids=[f"{'-'.join(names)}{'-elastic' * bool(more)}" for names, _, more in CASES],
)
def test_programs(programs, launcher, variables, monkeypatch) -> None:
    """Their assertions hold on every rank."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, str(ROOT / "tests/parallel/lifecycle.py"), *programs]
    done = run(launcher, command, SECONDS)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("passed in") == launcher.ranks * len(programs), done.stdout
