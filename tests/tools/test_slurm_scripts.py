"""The batch scripts without a Slurm: what shellcheck says, and what users are told to edit."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).resolve().parents[2] / "slurm").glob("*.sh"))


def test_shellcheck():
    program = Path(sys.executable).parent / "shellcheck"
    files = [*SCRIPTS, *SCRIPTS[0].parent.glob("*.sbatch")]
    command = [program, "--severity=style", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert len(SCRIPTS) == 6
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script(path):
    """Executable; what to ask Slurm for stands before the first command, where Slurm reads it; what
    is run exists; flags given to the script reach the training."""
    text = path.read_text()
    assert path.stat().st_mode & 0o111
    lines = text.splitlines()
    command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    asked = [i for i, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert asked and max(asked) < command
    assert text.count("# --- edit") == 2
    (training,) = re.findall(r"^training=\(python (\S+)", text, re.MULTILINE)
    assert (path.parent.parent / training).exists()
    assert f"sbatch slurm/{path.name}" in text
    assert '"$@"' in text
    assert "set -euo pipefail" in text
