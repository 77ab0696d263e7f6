"""The command line of `hvd-adaptive install-horovod`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from hvd_adaptive.tools import cli
from hvd_adaptive.tools.install import command as module
from hvd_adaptive.tools.install import preflight
from hvd_adaptive.tools.install.diagnose import MISSING


def command(*arguments: str) -> int:
    return cli.main(["install-horovod", *arguments])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cuda", "maybe"], "maybe"),
        (["--jobs", "0"], "integer of 1 or more"),
        (["--jobs", "two"], "integer of 1 or more"),
        (["--version", "newest"], "not a version"),
        (["--no-mpi", "--no-gloo"], "nothing to communicate with"),
        (["--colour"], "unrecognized"),
    ],
)
def test_bad_arguments(arguments, words, capsys):
    with pytest.raises(SystemExit) as raised:
        command(*arguments)
    assert raised.value.code == 2
    assert words in capsys.readouterr().err


def test_a_command_is_needed(capsys):
    with pytest.raises(SystemExit) as raised:
        cli.main([])
    assert raised.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


@pytest.fixture
def real_environment(tmp_path) -> Path:
    """This environment, if it has what a build needs."""
    scripts = Path(sys.executable).parent
    if preflight.problems(20, Path()):
        pytest.skip("no compiler for C++20, no Python headers or no make")
    if not shutil.which("cmake", path=f"{scripts}{os.pathsep}{os.environ['PATH']}"):
        pytest.skip("no cmake")
    return tmp_path


def test_dry_run_prints_what_would_be_run(real_environment, capsys):
    assert (
        command("--dry-run", "--no-mpi", "--jobs", "3", "--wheel-dir", str(real_environment)) == 0
    )
    printed = capsys.readouterr()
    assert "horovod==0.28.1" in printed.out.splitlines()[-1]
    assert "export HOROVOD_WITHOUT_MPI=1" in printed.out
    assert "export HOROVOD_WITH_GLOO=1" in printed.out
    assert "export MAKEFLAGS=-j3" in printed.out
    assert "torch" in printed.err and "GPU" in printed.err
    assert list(real_environment.iterdir()) == []


def test_dry_run_as_json(real_environment, capsys):
    assert command("--dry-run", "--json", "--wheel-dir", str(real_environment)) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["status"] == "planned"
    assert len(result["key"]) == 16
    assert result["environment"]["HOROVOD_WITH_PYTORCH"] == "1"
    assert result["command"][-1] == "horovod==0.28.1"


def test_errors_as_json(monkeypatch, capsys):
    monkeypatch.setenv("PATH", os.devnull)
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert command("--dry-run", "--json") == MISSING
    result = json.loads(capsys.readouterr().out)
    assert result["status"] == "error"
    assert any("/no/such/compiler" in hint for hint in result["hints"])


@pytest.fixture
def installs(facts, tmp_path, monkeypatch) -> Path:
    """Let the command install this wheel in a made-up environment."""
    wheel = tmp_path / ("0a" * 8) / "horovod.whl"
    monkeypatch.setattr(module, "gather", lambda options: facts)
    monkeypatch.setattr(module, "wheel_folder", lambda facts: wheel.parent)
    monkeypatch.setattr(module, "install", lambda facts, says: ("built", wheel))
    return wheel


def test_the_outcome_is_reported(facts, installs, capsys):
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
        "key": "0a" * 8,
        "wheel": str(installs),
    }
    assert command() == 0
    assert "Horovod 0.28.1: built, imports and works (0.0 s)" in capsys.readouterr().err


def test_sigterm_interrupts_the_command(installs, monkeypatch):
    """A batch system's signal then ends the compilers as Ctrl-C does."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(module, "install", lambda *_: signal.raise_signal(signal.SIGTERM))
    assert command() == cli.INTERRUPTED
    assert signal.getsignal(signal.SIGTERM) == before
