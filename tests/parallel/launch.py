"""Start a command on several ranks, under a time limit that kills all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
    """Run to the end; past ``seconds`` every process is killed and TimeoutError raised."""
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
    except subprocess.TimeoutExpired:
        _kill_tree(process.pid)
        output, _ = process.communicate()
        raise TimeoutError(f"{launcher} hung for {seconds} s:\n{output}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, output, "")


def _kill_tree(pid: int) -> None:
    """Launchers give their ranks process groups of their own: kill every descendant."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    for process in family:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
