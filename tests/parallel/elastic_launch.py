"""Start elastic Horovod, and read what its workers write."""

from __future__ import annotations

import json
from pathlib import Path

from launch import BIN, Launcher

SECONDS = 240


class Elastic(Launcher):
    """horovodrun with hosts that change; names of this machine stand in for hosts."""

    most = 3

    def command(self, command):
        return [
            str(BIN / "horovodrun"),
            "-np",
            "2",
            "--min-np",
            "2",
            "--max-np",
            str(self.most),
            "--network-interface",
            "lo",
            "--host-discovery-script",
            self.kind,
            *command,
        ]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
