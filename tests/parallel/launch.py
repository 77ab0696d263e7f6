"""Start a command on several ranks, under a time limit that kills all of them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

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
            return [str(BIN / "horovodrun"), "--gloo", "--disable-cache", *count, *command]
        options = ["--oversubscribe", "--mca", "mpi_yield_when_idle", "1"]
        return [str(BIN / "mpirun"), *count, *options, *command]

    def __str__(self) -> str:
        return f"{self.kind}-{self.ranks}"


LAUNCHERS = [Launcher(2, "mpirun"), Launcher(2, "gloo"), Launcher(4, "mpirun")]


def environment() -> dict[str, str]:
    """The test's environment, with what ranks on one small machine need."""
    return os.environ | {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        # Open MPI refuses root without these.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        # torch.compile's threads and processes come and go, and a check counts threads.
        "TORCH_WARM_POOL": "0",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }


@dataclass(frozen=True)
class Launched:
    """Ranks on their way; ``seconds`` from the start on they are killed."""

    launcher: Launcher
    process: subprocess.Popen
    output: IO[str]
    deadline: float

    def end(self) -> subprocess.CompletedProcess[str]:
        """Wait for the end; past the limit every process is killed and TimeoutError raised."""
        try:
            self.process.wait(max(0.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
            raise TimeoutError(f"{self.launcher} hung:\n{self._told()}") from None
        except BaseException:
            self.kill()
            raise
        return subprocess.CompletedProcess(
            self.process.args, self.process.returncode, self._told(), ""
        )

    def kill(self) -> None:
        """Launchers give their ranks process groups of their own: kill every descendant."""
        if self.process.poll() is None:
            parent = psutil.Process(self.process.pid)
            for process in [parent, *parent.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.process.wait()

    def _told(self) -> str:
        self.output.seek(0)
        return self.output.read()


def start(launcher: Launcher, command: Sequence[str], seconds: float) -> Launched:
    """Start and return; ``end()`` waits."""
    output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
    process = subprocess.Popen(
        launcher.command(command),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment(),
        cwd=ROOT,
        start_new_session=True,
    )
    return Launched(launcher, process, output, time.monotonic() + seconds)


def run(
    launcher: Launcher, command: Sequence[str], seconds: float
) -> subprocess.CompletedProcess[str]:
    """Start and wait for the end, at most ``seconds``."""
    return start(launcher, command, seconds).end()
