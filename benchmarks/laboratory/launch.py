"""Start the worker on every host, under a time limit that ends all of it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hvd_adaptive.tools.launch import ROOT, Ranks, missing
from hvd_adaptive.tools.processes import Job
from laboratory.hosts import INTERFACE, Hosts, LaboratoryError

HERE = Path(__file__).resolve().parent
SSH = HERE / "bin" / "ssh"
# What starts the ranks of each backend; those of DDP and FSDP meet over Gloo.
LAUNCHERS = {"mpi": "mpi", "gloo": "gloo", "ddp": "mpi", "fsdp": "mpi"}


def launch(
    hosts: Hosts, plan: dict[str, Any], seconds: float, program: str = "laboratory.worker"
) -> dict[str, Any]:
    """Run a program on all hosts.

    Args:
        hosts: where it runs.
        plan: see worker.py. Its ``folder`` is emptied.
        program: module that reads the plan, and runs a ``Rank``.
        seconds: time limit. A launcher that does not end after a rank has failed, as horovodrun
            sometimes does not, is ended earlier.

    Returns:
        {"ranks": what the ranks wrote (rank.py)}, and "error" if the launch ended badly.
    """
    folder = Path(plan["folder"])
    for old in folder.glob("rank-*"):
        old.unlink()
    (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    ranks = _ranks(hosts, plan["backend"], plan["ranks_per_host"])
    command = ranks.command([sys.executable, "-m", program, f"{folder}/plan.json"])
    first = hosts.addresses[0]
    job = Job(
        hosts.inside(first, command),
        seconds,
        environment=_environment(ranks, first, folder),
        folder=folder,
        output=folder / "output.log",
    )
    code = job.wait(lambda: any("failed" in rank for rank in _found(folder)))
    error = {"error": _error(code, seconds, job.text())} if code != 0 else {}
    return {"ranks": _found(folder)} | error


def missing_programs(backends: Iterable[str]) -> list[str]:
    """Return a message for each program that launches of these backends lack."""
    return missing(sorted({LAUNCHERS[backend] for backend in backends}))


def check_programs(backends: Iterable[str]) -> None:
    """Raise LaboratoryError if a launcher is missing."""
    if lacks := missing_programs(backends):
        raise LaboratoryError("; ".join(lacks))


def _ranks(hosts: Hosts, backend: str, per_host: int) -> Ranks:
    return Ranks(
        len(hosts.addresses) * per_host,
        LAUNCHERS[backend],
        hosts=",".join(f"{address}:{per_host}" for address in hosts.addresses),
        tcp=per_host == 1,
        interface=INTERFACE,
        remote_shell=str(SSH),
    )


def _found(folder: Path) -> list[dict[str, Any]]:
    """Return what the ranks have written so far, in their order."""
    files = sorted(folder.glob("rank-*.json"), key=lambda p: int(p.stem.split("-")[1]))
    return [json.loads(path.read_text(encoding="utf-8")) for path in files]


def _environment(ranks: Ranks, first: str, folder: Path) -> dict[str, str]:
    """Return the ranks' environment, which keeps HOROVOD_* and OMPI_MCA_* of the caller."""
    own = ranks.environment()
    ours = {"PATH": os.pathsep.join([str(SSH.parent), own["PATH"]])}
    ours |= {"PYTHONPATH": os.pathsep.join([str(HERE.parent), own["PYTHONPATH"]])}
    ours |= {"OMP_NUM_THREADS": "1", "LABORATORY_FIRST_HOST": first, "TMPDIR": str(folder)}
    ours |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE"), INTERFACE)
    return own | ROOT | ours


def _error(code: int | None, seconds: float, output: str) -> str:
    how = f"had to be ended (limit {seconds:.0f} s)" if code is None else f"exit status {code}"
    return "\n".join([how, *output.splitlines()[-25:]])
