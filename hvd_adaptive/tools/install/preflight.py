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
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

COMPILERS = ("g++", "c++", "clang++")
INSTALL_COMPILER = (
    "install one with your system's package manager "
    "(Debian, Ubuntu: g++ and make; Fedora, RHEL: gcc-c++ and make), load your cluster's gcc "
    "module, or set CXX to its path"
)
INSTALL_HEADERS = (
    "install Python's development headers (Debian, Ubuntu: python3-dev; Fedora, RHEL: "
    "python3-devel), or use a Python that carries them, such as pyenv's or conda's"
)
INSTALL_VENV = "install the venv module (Debian, Ubuntu: python3-venv)"
INSTALL_MAKE = "install GNU make with your system's package manager"


def find_compiler(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the C++ compiler's command: $CXX if set, else the first known one on the path."""
    wanted = [shlex.split(environ["CXX"])] if environ.get("CXX") else [[name] for name in COMPILERS]
    for name, *arguments in wanted:
        if found := shutil.which(name, path=environ.get("PATH")):
            return (found, *arguments)
    return None


def compiler_problem(environ: Mapping[str, str], standard: int) -> str | None:
    """Return why there is no compiler for C++ `standard`, with what to do; None if there is one."""
    command = find_compiler(environ)
    if command is None:
        named = environ.get("CXX")
        what = f"CXX={named} does not exist" if named else f"none of {', '.join(COMPILERS)} exists"
        return f"no C++ compiler: {what}; {INSTALL_COMPILER}"
    complaint = _try_compile(command, standard)
    return complaint and (
        f"{shlex.join(command)} does not compile C++{standard} ({complaint}); g++ 11, clang++ 14 "
        f"or newer does: {INSTALL_COMPILER}"
    )


def _try_compile(command: Sequence[str], standard: int) -> str | None:
    """Compile one line as C++ `standard`; return None or the compiler's first words."""
    with tempfile.TemporaryDirectory(prefix="hvd_adaptive-") as folder:
        source = Path(folder, "probe.cc")
        source.write_text("#include <string>\nint main() { return std::string().size(); }\n")
        words = [*command, f"-std=c++{standard}", "-c", str(source), "-o", f"{folder}/probe.o"]
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, errors="replace", timeout=120
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    if done.returncode == 0:
        return None
    lines = (done.stderr or done.stdout).strip().splitlines()
    return lines[0] if lines else f"exit status {done.returncode}"


def problems(environ: Mapping[str, str], standard: int) -> list[str]:
    """Return what a build with C++ `standard` lacks, and what to do; empty if it lacks nothing."""
    headers = sysconfig.get_paths()["include"]
    found = (
        []
        if Path(headers, "Python.h").is_file()
        else [f"Python.h is not in {headers}: {INSTALL_HEADERS}"]
    )
    if not shutil.which("make", path=environ.get("PATH")):
        found.append(f"there is no make: {INSTALL_MAKE}")
    compiler = compiler_problem(environ, standard)
    return [*found, compiler] if compiler else found


def folder_problem(folder: Path) -> str | None:
    """Return why Open MPI cannot be used from `folder`; None if it can."""
    if not any(letter.isspace() for letter in str(folder)):
        return None
    return f"'{folder}' has a space in it, which Open MPI's compilers cannot handle: move it"


def main() -> int:
    """Print every problem at once, so that one visit to the package manager is enough."""
    found = problems(os.environ, 20)
    found += filter(None, [folder_problem(Path.cwd())])
    if not (importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")):
        found.append(f"{sys.executable} cannot make virtual environments: {INSTALL_VENV}")
    for problem in found:
        print(f"hvd_adaptive set-up: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
