"""Start a command on several ranks, under a time limit that kills all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_adaptive.tools.launch import ROOT as AS_ROOT
from hvd_adaptive.tools.launch import Ranks
from hvd_adaptive.tools.processes import Job

BIN = Path(sys.executable).parent
TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent


@dataclass(frozen=True)
class Launcher:
    """A way to start ``ranks`` processes."""

    ranks: int
    kind: str

    def command(self, command: Sequence[str]) -> list[str]:
        """The launcher's command line around ``command``."""
        launcher = "gloo" if self.kind == "gloo" else "mpi"
        return Ranks(self.ranks, launcher).command(command)

    def __str__(self) -> str:
        return f"{self.kind}-{self.ranks}"


LAUNCHERS = [Launcher(2, "mpirun"), Launcher(2, "gloo"), Launcher(4, "mpirun")]


def environment() -> dict[str, str]:
    """The test's environment, with what ranks on one small machine need."""
    return os.environ | {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
        ),
        "OMP_NUM_THREADS": "1",
        **AS_ROOT,
        # torch.compile's threads and processes come and go, and a check counts threads.
        "TORCH_WARM_POOL": "0",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }


def start(launcher: Launcher, command: Sequence[str], seconds: float) -> Job:
    """Start and return; ``wait()`` waits at most so many seconds from now on."""
    return Job(launcher.command(command), seconds, environment=environment(), folder=ROOT)


def run(
    launcher: Launcher, command: Sequence[str], seconds: float
) -> subprocess.CompletedProcess[str]:
    """Start and wait for the end; TimeoutError after so many seconds."""
    job = start(launcher, command, seconds)
    code = job.wait()
    if code is None:
        raise TimeoutError(f"{launcher} hung:\n{job.text()}")
    return subprocess.CompletedProcess(job.command, code, job.text(), "")
