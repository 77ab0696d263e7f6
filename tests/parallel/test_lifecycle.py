"""Horovod started, ended and started again; subsets of ranks; unlike processors: programs of
lifecycle.py, launched on their own."""

from __future__ import annotations

import sys

import forked
import pytest
from launch import ROOT, Launcher, run

SECONDS = 400  # unlike processors compile kernels anew, the first time
PROGRAM = ROOT / "tests/parallel/lifecycle.py"
LAUNCHED = [
    ("shutdown_and_init", Launcher(2, "mpirun")),
    ("subsets", Launcher(4, "mpirun")),
    ("ended_in_flight", Launcher(2, "mpirun")),
    # It compiles every kernel twice; tests/golden holds the bits of one processor.
    pytest.param("unlike_processors", Launcher(2, "mpirun"), marks=pytest.mark.thorough),
]
ELASTIC = {"HOROVOD_ELASTIC": "1"}
FORKED = [
    ("closed", 2, {}),
    ("static_process_sets", 4, {}),
    ("alone", 1, {}),
    ("alone", 1, ELASTIC),
]


@pytest.mark.parallel
@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize(("program", "launcher"), LAUNCHED)
def test_launched(program, launcher) -> None:
    """Its assertions hold on every rank."""
    done = run(launcher, [sys.executable, str(PROGRAM), program], SECONDS)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("passed in") == launcher.ranks, done.stdout


@pytest.mark.parallel
@pytest.mark.parametrize(
    ("program", "ranks", "variables"),
    FORKED,
    ids=[f"{name}{'-elastic' * bool(variables)}" for name, _, variables in FORKED],
)
def test_over_gloo(program, ranks, variables, tmp_path) -> None:
    told = forked.run(ranks, PROGRAM, [program], variables, tmp_path, 180)
    assert told.count("passed in") == ranks, told
