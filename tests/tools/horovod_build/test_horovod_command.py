"""The command line of `hvd-adaptive install-horovod`."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from hvd_adaptive.tools import cli
from hvd_adaptive.tools.install import command as module
from hvd_adaptive.tools.install import preflight
from hvd_adaptive.tools.install.diagnose import MISSING
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
