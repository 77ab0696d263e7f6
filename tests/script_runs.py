"""Run scripts of the repository as a user does, on one or more ranks."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_adaptive.tools.processes import Job

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
# Two ranks of a command.
MPIRUN = [str(BIN / "mpirun"), "-np", "2", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1"]


def run(command: list[str], cwd: Path, seconds: float) -> subprocess.CompletedProcess[str]:
    """Run to the end; what takes longer is killed with all its descendants, and fails."""
    environment = os.environ | {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    job = Job(command, seconds, environment=environment, folder=cwd)
    code = job.wait()
    if code is None:
        pytest.fail(f"{' '.join(command)}\nran longer than {seconds} s:\n{job.text()}")
    return subprocess.CompletedProcess(command, code, job.text())


def png_size(path: Path) -> tuple[int, int]:
    """Width and height from a PNG's header."""
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert head[12:16] == b"IHDR"
    return struct.unpack(">II", head[16:24])
