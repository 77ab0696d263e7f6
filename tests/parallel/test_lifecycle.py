"""Horovod started, ended and started again; subsets of ranks; unlike processors: programs of
lifecycle.py, launched on their own."""

from __future__ import annotations

import re
import sys

import forked
import pytest
from script_runs import ROOT, run

from hvd_adaptive.tools.launch import Ranks

SECONDS = 400  # unlike processors compile kernels anew, the first time
PROGRAM = ROOT / "tests/parallel/ranks/lifecycle.py"
LAUNCHED = [
    (["shutdown_and_init", "stalled", "ended_in_flight", "subsets"], 3),
    # It compiles every kernel twice; tests/golden holds the bits of one processor.
    pytest.param(["unlike_processors"], 2, marks=pytest.mark.thorough),
]
ELASTIC = {"HOROVOD_ELASTIC": "1"}
FORKED = [
    ("closed", 2, {}),
    ("static_process_sets", 4, {}),
    ("alone", 1, {}),
    ("alone", 1, ELASTIC),
]


@pytest.mark.parallel
@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize(("programs", "ranks"), LAUNCHED)
def test_launched(programs, ranks, monkeypatch) -> None:
    """Their assertions hold on every rank, one program after the other."""
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "1")
    command = Ranks(ranks).command([sys.executable, str(PROGRAM), *programs])
    told = run(command, ROOT, SECONDS)
    assert told.count("passed in") == ranks * len(programs), told
    if "stalled" in programs:
        check_stall_warning(told)


def check_stall_warning(told: str) -> None:
    """Each line that docs/failures.md quotes is printed, but for the seconds and the order."""
    page = (ROOT / "docs/failures.md").read_text(encoding="utf-8")
    quoted = re.search(r"^    One or more tensors.*?\n\n", page, re.MULTILINE | re.DOTALL)[0]
    first, missing = " ".join(quoted.split()).split(" [...] ")
    assert first.replace("60 seconds", "1 seconds") in told, told
    heading, names = missing.split(" 1: [")
    printed = re.findall(rf"{heading}\n1: \[(.*)\]", told)  # a busy machine stalls elsewhere, too
    wanted = set(names.rstrip("]").split(", "))
    assert any(wanted <= set(listed.split(", ")) for listed in printed), told


@pytest.mark.parallel
@pytest.mark.parametrize(
    ("program", "ranks", "variables"),
    FORKED,
    ids=[f"{name}{'-elastic' * bool(variables)}" for name, _, variables in FORKED],
)
def test_over_gloo(program, ranks, variables, tmp_path) -> None:
    told = forked.run(ranks, PROGRAM, [program], variables, tmp_path, 180)
    assert told.count("passed in") == ranks, told
