"""Check for a C++ compiler, Python headers and make.

`make setup` runs this file with the system's Python before anything is installed: it imports the
standard library only.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

COMPILERS = ("g++", "c++", "clang++")
INSTALL_COMPILER = (
    "install one with your system's package manager (Debian, Ubuntu: g++ and make; Fedora, RHEL: "
    "gcc-c++ and make), load your cluster's gcc module, or set CXX to its path"
)


def find_compiler() -> list[str] | None:
    """Return the C++ compiler's command: $CXX if set, else the first known one on the path."""
    named = os.environ.get("CXX")
    for name, *arguments in map(shlex.split, [named] if named else COMPILERS):
        if found := shutil.which(name):
            return [found, *arguments]
    return None


def compiler_problem(standard: int) -> str | None:
    """Return why there is no compiler for C++ `standard`, with what to do; None if there is one."""
    command, named = find_compiler(), os.environ.get("CXX")
    if command is None:
        what = f"CXX={named} does not exist" if named else f"none of {', '.join(COMPILERS)} exists"
        return f"no C++ compiler: {what}; {INSTALL_COMPILER}"
    probe = [*command, f"-std=c++{standard}", "-fsyntax-only", "-x", "c++", "-"]
    texts: Any = {"input": "#include <string>\n", "text": True, "errors": "replace"}
    try:
        done = subprocess.run(probe, capture_output=True, timeout=120, **texts)
        if done.returncode == 0:
            return None
        complaint = done.stderr.strip().partition("\n")[0] or f"exit status {done.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        complaint = str(error)
    newer = f"g++ 11, clang++ 14 or newer does: {INSTALL_COMPILER}"
    return f"{shlex.join(command)} does not compile C++{standard} ({complaint}); {newer}"


def problems(standard: int, mpi: Path) -> list[str]:
    """Return what a build with C++ `standard` and the MPI at path `mpi` lacks, and what to do."""
    found = [problem] if (problem := compiler_problem(standard)) else []
    headers = sysconfig.get_paths()["include"]
    if not Path(headers, "Python.h").is_file():
        packages = "python3-dev (Debian, Ubuntu) or python3-devel (Fedora, RHEL)"
        found.append(f"Python.h is not in {headers}: install {packages}")
    if not shutil.which("make"):
        found.append("there is no make: install GNU make with your system's package manager")
    if " " in str(mpi):
        found.append(f"'{mpi}' has a space, which Open MPI's compilers cannot handle: move it")
    return found


def main() -> int:
    """Print every problem at once, so that one visit to the package manager is enough."""
    found = problems(20, Path.cwd())
    if not (importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")):
        what = f"{sys.executable} cannot make virtual environments"
        found.append(f"{what}: install the venv module (Debian, Ubuntu: python3-venv)")
    for problem in found:
        print(f"hvd_adaptive set-up: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
