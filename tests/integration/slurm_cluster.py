"""A Slurm of one machine: daemons of Debian's packages with keys, ports and folders of their own.

Four slurmd play four nodes. "n1" and "n2" have names that nothing resolves, as if they were other
machines: Open MPI starts its own daemons on them through Slurm. "localhost" and this host's name
are for horovodrun, which would reach others by ssh.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from hvd_adaptive.tools.processes import TEXTS, Job

# What starts daemons, and what srun --mpi=pmix loads under the name that the last one brings.
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge", "libpmix-dev")
CONFIGURATION = """\
ClusterName={name}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
KillWait=5
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
StateSaveLocation={folder}/slurmctld
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
"""
NODE = "NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 State=UNKNOWN\n"
# NO: jobs wait for each other, where side by side on the same cores each would take far longer.
PARTITION = "PartitionName={name} Nodes={nodes} Default={default} State=UP OverSubscribe=NO\n"


class Unavailable(Exception):
    """Why there can be no Slurm here."""


def install() -> None:
    """Debian's packages, where they are missing."""
    if os.geteuid() != 0:
        raise Unavailable("Slurm's daemons want root")
    if not shutil.which("dpkg-query") or not shutil.which("apt-get"):
        raise Unavailable("Slurm is installed from Debian's packages, and this is no Debian")
    if subprocess.run(["dpkg-query", "--show", *PACKAGES], capture_output=True).returncode == 0:
        return
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    get = ["apt-get", "-q", "-y", "-o", "DPkg::Lock::Timeout=60"]
    for command in ([*get, "update"], [*get, "install", "--no-install-recommends", *PACKAGES]):
        job = Job(command, 240, environment=environment)
        if job.wait() != 0:
            raise Unavailable(f"{' '.join(command)}: {job.text()[-500:]}")


@dataclass(frozen=True)
class Cluster:
    """A running Slurm; ``environment`` is what its commands need."""

    name: str
    folder: Path
    environment: dict[str, str]

    def run(self, *command: str, cwd: Path | None = None) -> str:
        """What a Slurm command prints; its error where it fails."""
        done = subprocess.run(
            command, env=self.environment, cwd=cwd or self.folder, timeout=60, **TEXTS
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
        return done.stdout

    def submit(self, name: str, cwd: Path, words=(), options=()) -> str:
        """Run a script of slurm/, whose output goes to ``cwd``; the job's number. words: of the
        script. options: of sbatch."""
        script = Path(__file__).resolve().parents[2] / "slurm" / f"{name}.sh"
        command = ["sbatch", "--parsable", f"--output={cwd}/{name}.out", *options, str(script)]
        return self.run(*command, *words, cwd=cwd).strip()

    def job(self, number: str) -> dict[str, str]:
        """What ``scontrol show job`` tells."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.partition("=")[::2] for word in words)

    def log(self) -> str:
        return "\n".join(p.read_text()[-1500:] for p in sorted(self.folder.glob("*.log")))


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Cluster]:
    """Start one; stop it, its jobs and all they have started, whatever happens inside."""
    name = f"hvd{os.getpid()}"
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
    cluster, daemons = Cluster(name, folder, environment), list[Job]()
    host = socket.gethostname().partition(".")[0]
    # Slurm wants the one that has its host's name first.
    nodes = {host: "local", "localhost": "local", "n1": "separate", "n2": "separate"}
    _configure(cluster, host, nodes)
    try:
        munge = [f"--{end}-file={folder}/munge.{end}" for end in ("key", "pid", "log", "seed")]
        munge += ["--foreground", "--force", f"--socket={folder}/munge.socket"]
        commands = [["munged", *munge], ["slurmctld", "-D"]]
        commands += [["slurmd", "-D", "-N", node] for node in nodes]
        for place, command in enumerate(commands):
            log = folder / f"{command[0]}-{place}.log"
            kept: Any = {"environment": environment, "folder": folder, "output": log}
            daemons.append(Job(command, math.inf, **kept))
            if command[0] == "munged":
                _wait_for(lambda: (folder / "munge.socket").exists(), cluster, daemons)
        _wait_for(lambda: _idle_nodes(cluster) == len(nodes), cluster, daemons)
        yield cluster
    finally:
        for daemon in reversed(daemons):
            daemon.end()
        left = left_over(cluster)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=30)


def _configure(cluster: Cluster, host: str, nodes: dict[str, str]) -> None:
    folder = cluster.folder
    with contextlib.ExitStack() as held:  # until all are known, so that no two are the same
        sockets = [held.enter_context(socket.socket()) for _ in range(1 + len(nodes))]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        port, *ports = (one.getsockname()[1] for one in sockets)
    text = CONFIGURATION.format(name=cluster.name, host=host, port=port, folder=folder)
    for node, own in zip(nodes, ports, strict=True):
        text += NODE.format(node=node, host=host, port=own)
        (folder / node).mkdir()
    for name in dict.fromkeys(nodes.values()):
        members = ",".join(node for node, partition in nodes.items() if partition == name)
        default = "NO" if name == "local" else "YES"
        text += PARTITION.format(name=name, nodes=members, default=default)
    (folder / "slurmctld").mkdir()
    (folder / "slurm.conf").write_text(text)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)


def _idle_nodes(cluster: Cluster) -> int:
    with contextlib.suppress(RuntimeError):  # slurmctld does not answer yet
        told = cluster.run("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N")
        return len(told.split())
    return 0


def _wait_for(ready, cluster: Cluster, daemons: list[Job]) -> None:
    end = time.monotonic() + 60
    while not ready():
        if time.monotonic() > end or any(daemon.process.poll() is not None for daemon in daemons):
            raise RuntimeError(f"a daemon did not start:\n{cluster.log()}")
        time.sleep(0.2)


def left_over(cluster: Cluster) -> list[psutil.Process]:
    """Processes of the cluster's jobs, and what Slurm runs them under: no other has this file in
    its environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            told = process.environ().get("SLURM_CONF") == cluster.environment["SLURM_CONF"]
            if told and process.pid != os.getpid():
                found.append(process)
    return found
