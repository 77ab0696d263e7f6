"""Start a command on several ranks, under a time limit that kills all of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Launcher:
    """A way to start ``ranks`` processes."""

    ranks: int
    kind: str

    def command(self, command: Sequence[str]) -> list[str]:
        """The launcher's command line around ``command``."""
        count = ["-np", str(self.ranks)]
        if self.kind == "gloo":
            return [str(BIN / "horovodrun"), "--gloo", *count, *command]
        options = ["--oversubscribe", "--mca", "mpi_yield_when_idle", "1"]
        return [str(BIN / "mpirun"), *count, *options, *command]

    def __str__(self) -> str:
        return f"{self.kind}-{self.ranks}"


LAUNCHERS = [Launcher(2, "mpirun"), Launcher(4, "mpirun"), Launcher(2, "gloo")]


def environment() -> dict[str, str]:
    """The test's environment, with what ranks on one small machine need."""
    return os.environ | {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        # Open MPI refuses root without these.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }


def run(
    launcher: Launcher, command: Sequence[str], seconds: float
) -> subprocess.CompletedProcess[str]:
    """Run to the end; past ``seconds`` every process is killed and TimeoutExpired raised."""
    process = subprocess.Popen(
        launcher.command(command),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as error:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        error.output = output
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, "")
