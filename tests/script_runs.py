"""Run scripts of the repository as a user does, on one or more ranks."""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hvd_adaptive.tools.launch import Ranks
from hvd_adaptive.tools.processes import Job

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
# Two ranks of a command.
MPIRUN = [str(BIN / "mpirun"), "-np", "2", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1"]


def environment() -> dict[str, str]:
    """The test's environment, with what ranks on one small machine need."""
    path = os.environ.get("PYTHONPATH", "")
    return Ranks(1).environment() | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), path]),
        "OMP_NUM_THREADS": "1",
        # torch.compile's threads and processes come and go, and a check counts threads.
        "TORCH_WARM_POOL": "0",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }


def run(command: Sequence[str], cwd: Path, seconds: float, status: int = 0) -> str:
    """What a command prints, whose exit status must be this one; what takes longer is killed with
    all its descendants, and fails."""
    job = Job(command, seconds, environment=environment(), folder=cwd)
    code = job.wait()
    if code is None:
        pytest.fail(f"{' '.join(command)}\nran longer than {seconds} s:\n{job.text()}")
    assert code == status, job.text()
    return job.text()


def png_size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert head[12:16] == b"IHDR"
    return struct.unpack(">II", head[16:24])
