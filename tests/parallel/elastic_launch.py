"""Start elastic Horovod, and read what its workers write."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from launch import BIN, ROOT, Launcher, run

SECONDS = 240
# How long a survivor may wait for one that was killed, and all do for one that starts.
LIMIT = "HOROVOD_GLOO_TIMEOUT_SECONDS=40"


class Elastic(Launcher):
    """horovodrun with hosts that change; names of this machine stand in for hosts."""

    def command(self, command):
        most = ["-np", "2", "--min-np", "2", "--max-np", str(self.ranks)]
        hosts = ["--network-interface", "lo", "--host-discovery-script", self.kind]
        return ["env", LIMIT, str(BIN / "horovodrun"), *most, *hosts, *command]


def logs_of(program: str, folder: Path, *words: str, hosts: str, most: int = 3):
    """Run a program of tests/parallel/ranks to its end; its output, and each host's lines."""
    script = folder / "discover.sh"
    script.write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
    script.chmod(0o755)
    (folder / "hosts").write_text(hosts)
    path = str(ROOT / "tests/parallel/ranks" / program)
    command = [sys.executable, path, str(folder), *words]
    done = run(Elastic(most, str(script)), command, SECONDS)
    assert done.returncode == 0 and "Traceback" not in done.stdout, done.stdout
    lines = {path.stem: path.read_text().splitlines() for path in folder.glob("*.log")}
    return done.stdout, {host: [json.loads(line) for line in of] for host, of in lines.items()}


def sizes_of(log: list[dict]) -> list[int]:
    """The numbers of workers, one after the other."""
    sizes = [entry["size"] for entry in log]
    return [size for size, before in zip(sizes, [0, *sizes], strict=False) if size != before]
