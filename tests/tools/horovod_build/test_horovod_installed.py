"""The Horovod that is installed here: found, tried and compared; and what the command reports."""

from __future__ import annotations

import dataclasses
import json

import pytest

from hvd_adaptive.tools import cli
from hvd_adaptive.tools.install import command, install
from hvd_adaptive.tools.install.environment import Options
from hvd_adaptive.tools.install.install import Outcome


def test_the_installed_one_is_compared_with_what_was_asked_for(facts):
    horovod = pytest.importorskip("horovod")
    assert install.installed()[0] == horovod.__version__
    other = dataclasses.replace(facts, torch=dataclasses.replace(facts.torch, version="1.0"))
    told = install.problems(Options(version="0.0.1"), other)
    assert f"version is {horovod.__version__}, not 0.0.1" in told
    assert any(line.startswith("torch is ") and line.endswith(", not 1.0") for line in told)


def test_one_that_cannot_be_imported(facts, monkeypatch):
    monkeypatch.setattr(install, "_PROBE", "raise ImportError('undefined symbol')")
    (told,) = install.problems(Options(), facts)
    assert told.startswith("import horovod.torch fails: ")
    assert told.endswith("ImportError: undefined symbol")


@pytest.mark.parametrize("as_json", [True, False])
def test_the_outcome_is_reported(facts, as_json, tmp_path, monkeypatch, capsys):
    wheel = tmp_path / "horovod.whl"
    monkeypatch.setattr("hvd_adaptive.tools.install.install.gather", lambda *_: facts)
    monkeypatch.setattr("hvd_adaptive.tools.install.install.build_key", lambda *_: "0a1b")
    monkeypatch.setattr(command, "install", lambda job: Outcome("built", wheel, 61.04))
    assert cli.main(["install-horovod", *["--json"] * as_json]) == 0
    printed = capsys.readouterr()
    if as_json:
        assert json.loads(printed.out) == {
            "status": "built",
            "version": "0.28.1",
            "torch": "2.13.0",
            "mpi": str(facts.mpi),
            "gloo": True,
            "nccl": False,
            "key": "0a1b",
            "wheel": str(wheel),
            "seconds": 61.0,
        }
    else:
        assert "Horovod 0.28.1: built, imports and works (61.0 s)" in printed.err


def test_an_interrupted_command_says_so(facts, monkeypatch, capsys):
    def interrupted(job):
        raise KeyboardInterrupt

    monkeypatch.setattr("hvd_adaptive.tools.install.install.gather", lambda *_: facts)
    monkeypatch.setattr(command, "install", interrupted)
    assert cli.main(["install-horovod"]) == command.INTERRUPTED
    assert "nothing was installed" in capsys.readouterr().err
