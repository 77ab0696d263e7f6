"""The same seed and number of ranks give the same bits in every launch, over MPI and over Gloo."""

from __future__ import annotations

import sys
import time

import forked
import psutil
import pytest
from launch import ROOT, Launcher, start


@pytest.mark.parallel
@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.thorough)])
def test_gloo_gives_the_bits_of_a_simulation(ranks, tmp_path) -> None:
    """As every launch of the rank checks does (check_simulation.py), so that all are alike. Sums in
    rank order depend on nothing that carries them: stock allreduce differs from run to run."""
    program = ROOT / "tests/parallel/ranks/repeat.py"
    told = forked.run(ranks, program, [], {}, tmp_path, 180)
    assert told.count(f"all cases: the same bits on {ranks} ranks") == ranks, told


@pytest.mark.parallel
def test_a_hang_is_killed(tmp_path) -> None:
    """The launcher's own time limit ends ranks that would wait for ever."""
    write = f"import os, time; open(f'{tmp_path}/{{os.getpid()}}', 'w'); time.sleep(600)"
    job = start(Launcher(2, "mpirun"), [sys.executable, "-c", write], 60)
    while len(list(tmp_path.iterdir())) < 2:
        assert time.monotonic() < job.deadline, "ranks do not start"
        time.sleep(0.05)
    job.deadline = time.monotonic() + 0.2
    assert job.wait() is None
    pids = [int(path.name) for path in tmp_path.iterdir()]
    end = time.monotonic() + 30
    while any(map(psutil.pid_exists, pids)):
        assert time.monotonic() < end, "ranks are left"
        time.sleep(0.05)
