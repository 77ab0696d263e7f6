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

COMPILERS = ("g++", "c++", "clang++")
INSTALL_COMPILER = (
    "install one with your system's package manager (Debian, Ubuntu: g++ and make; Fedora, RHEL: "
    "gcc-c++ and make), load your cluster's gcc module, or set CXX to its path"
)
INSTALL_HEADERS = "install python3-dev (Debian, Ubuntu) or python3-devel (Fedora, RHEL)"


def find_compiler() -> list[str] | None:
    """Return the C++ compiler's command: $CXX if set, else the first known one on the path."""
    named = os.environ.get("CXX")
    for name, *arguments in map(shlex.split, [named] if named else COMPILERS):
        if found := shutil.which(name):
            return [found, *arguments]
    return None


def compiler_problem(standard: int) -> str | None:
    """Return why there is no compiler for C++ `standard`, with what to do; None if there is one."""
    command = find_compiler()
    if command is None:
        named = os.environ.get("CXX")
        what = f"CXX={named} does not exist" if named else f"none of {', '.join(COMPILERS)} exists"
        return f"no C++ compiler: {what}; {INSTALL_COMPILER}"
    probe = [*command, f"-std=c++{standard}", "-fsyntax-only", "-x", "c++", "-"]
    program = "#include <string>\n"
    try:
        done = subprocess.run(
            probe, input=program, capture_output=True, text=True, errors="replace", timeout=120
        )
        if done.returncode == 0:
            return None
        complaint = done.stderr.strip().partition("\n")[0] or f"exit status {done.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        complaint = str(error)
    return (
        f"{shlex.join(command)} does not compile C++{standard} ({complaint}); g++ 11, clang++ 14 "
        f"or newer does: {INSTALL_COMPILER}"
    )


def problems(standard: int, mpi: Path) -> list[str]:
    """Return what a build with C++ `standard` and the MPI at path `mpi` lacks, and what to do."""
    found = [problem] if (problem := compiler_problem(standard)) else []
    headers = sysconfig.get_paths()["include"]
    if not Path(headers, "Python.h").is_file():
        found.append(f"Python.h is not in {headers}: {INSTALL_HEADERS}")
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
