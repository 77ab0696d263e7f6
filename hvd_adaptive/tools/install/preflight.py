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


def headers_problem() -> str | None:
    """Return why Python.h is missing, with what to do; None if it exists."""
    folder = sysconfig.get_paths()["include"]
    exists = Path(folder, "Python.h").is_file()
    return None if exists else f"Python.h is not in {folder}: {INSTALL_HEADERS}"


def make_problem(environ: Mapping[str, str]) -> str | None:
    """Return why Horovod's makefiles cannot be run; None if they can."""
    exists = shutil.which("make", path=environ.get("PATH"))
    return None if exists else f"there is no make: {INSTALL_MAKE}"


def folder_problem(folder: Path) -> str | None:
    """Return why Open MPI cannot be used from `folder`; None if it can."""
    if not any(letter.isspace() for letter in str(folder)):
        return None
    return f"'{folder}' has a space in it, which Open MPI's compilers cannot handle: move it"


def venv_problem() -> str | None:
    """Return why this Python cannot make a virtual environment; None if it can."""
    if importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip"):
        return None
    return f"{sys.executable} cannot make virtual environments: {INSTALL_VENV}"


def main() -> int:
    """Print every problem at once, so that one visit to the package manager is enough."""
    checks = (
        folder_problem(Path.cwd()),
        venv_problem(),
        headers_problem(),
        make_problem(os.environ),
        compiler_problem(os.environ, int(sys.argv[1]) if len(sys.argv) > 1 else 20),
    )
    problems = [problem for problem in checks if problem]
    for problem in problems:
        print(f"hvd_adaptive set-up: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
