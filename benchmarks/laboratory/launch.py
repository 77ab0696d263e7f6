"""Starts the worker on every host, under a time limit that ends all of it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from laboratory.hosts import INTERFACE, Hosts, LaboratoryError

HERE = Path(__file__).resolve().parent
SSH = HERE / "bin" / "ssh"
BIN = Path(sys.executable).parent
GRACE = 5.0  # seconds in which a launcher should end once a rank has failed


def _mpirun(addresses: list[str], per_host: int) -> list[str]:
    # Every daemon would bind its rank to the machine's first core.
    settings = {
        "plm_rsh_agent": str(SSH),
        "btl": "tcp,self" if per_host == 1 else "tcp,vader,self",
        "btl_tcp_if_include": INTERFACE,
        "oob_tcp_if_include": INTERFACE,
        "mpi_yield_when_idle": "1",
    }
    mca = [word for key, value in settings.items() for word in ("--mca", key, value)]
    return [_program("mpirun"), *_ranks(addresses, per_host), "--bind-to", "none", *mca]


def _horovodrun(addresses: list[str], per_host: int) -> list[str]:
    return [
        _program("horovodrun"),
        "--gloo",
        *_ranks(addresses, per_host),
        "--network-interface",
        INTERFACE,
        "--disable-cache",
    ]


def _ranks(addresses: list[str], per_host: int) -> list[str]:
    """As both launchers take them."""
    slots = ",".join(f"{address}:{per_host}" for address in addresses)
    return ["-np", str(len(addresses) * per_host), "-H", slots]


LAUNCHERS: dict[str, Callable[[list[str], int], list[str]]] = {
    "mpi": _mpirun,
    "gloo": _horovodrun,
    "ddp": _mpirun,
}


def missing_programs(backends: set[str]) -> list[str]:
    """What the launches of these backends lack, in words."""
    wanted = {"horovodrun" if backend == "gloo" else "mpirun" for backend in backends}
    lacks = [name for name in sorted(wanted) if _program(name) is None]
    return [f"the program {name}: make setup, or `hvd-adaptive install-horovod`" for name in lacks]


def _program(name: str) -> str | None:
    """The environment's own program, else the one on the path."""
    return shutil.which(name, path=f"{BIN}{os.pathsep}{os.environ.get('PATH', os.defpath)}")


def launch(hosts: Hosts, plan: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Run the worker on all hosts; what the ranks found, and ``error`` where it ended badly.

    plan: see worker.py; its ``folder`` is emptied. After ``seconds`` everything is killed.
    """
    folder = Path(plan["folder"])
    for old in folder.glob("rank-*"):
        old.unlink()
    (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    command = [
        *LAUNCHERS[plan["backend"]](hosts.addresses, plan["ranks_per_host"]),
        sys.executable,
        "-m",
        "laboratory.worker",
        str(folder / "plan.json"),
    ]
    first = hosts.addresses[0]
    with (folder / "output.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            hosts.inside(first, command),
            env=_environment(first, folder),
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code = _wait(process, seconds, folder)
        finally:
            # Ranks have process groups of their own, but none leaves its host's namespace.
            hosts.kill_processes()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    told = {"error": _told(code, seconds, folder)} if code != 0 else {}
    return {"ranks": _found(folder)} | told


def _wait(process: subprocess.Popen, seconds: float, folder: Path) -> int | None:
    """Exit status; None where time ran out, or where a rank has failed and the launcher does not
    end, as horovodrun sometimes does not."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(1.0)
        if any("failed" in rank for rank in _found(folder)):
            deadline = min(deadline, time.monotonic() + GRACE)
    return None


def _found(folder: Path) -> list[dict[str, Any]]:
    """What the ranks have written so far, in their order."""
    files = sorted(folder.glob("rank-*.json"), key=lambda p: int(p.stem.split("-")[1]))
    return [json.loads(path.read_text(encoding="utf-8")) for path in files]


def _environment(first: str, folder: Path) -> dict[str, str]:
    """This program's, with what ranks need; HOROVOD_* and OMPI_MCA_* of the caller hold."""
    paths = [str(HERE.parent), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PATH": os.pathsep.join([str(SSH.parent), str(BIN), os.environ.get("PATH", os.defpath)]),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "HOROVOD_GLOO_IFACE": INTERFACE,
        "LABORATORY_FIRST_HOST": first,
        "TMPDIR": str(folder),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }


def _told(code: int | None, seconds: float, folder: Path) -> str:
    lines = (folder / "output.log").read_text(encoding="utf-8", errors="replace").splitlines()
    how = f"had to be ended (limit {seconds:.0f} s)" if code is None else f"exit status {code}"
    return "\n".join([how, *lines[-25:]])


def check_programs(backends: set[str]) -> None:
    """LaboratoryError where a launcher is missing."""
    if lacks := missing_programs(backends):
        raise LaboratoryError("; ".join(lacks))
