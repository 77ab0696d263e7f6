"""benchmarks/first_step.py: what it makes of the ranks' seconds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def first_step(monkeypatch):
    import first_step

    yield first_step
    sys.modules.pop("first_step")


def test_a_cold_and_a_warm_launch_share_a_folder(first_step, monkeypatch, capsys):
    folders = []

    def launched(method, count, folder):
        folders.append(folder)
        cold = folders.count(folder) == 1
        return [10.0 * count if cold else 0.5 * count, 0.2, *[0.1] * 10]

    monkeypatch.setattr(first_step, "launched", launched)
    assert (
        first_step.main(["--ranks", "2", "4", "--methods", "ALQ(bits=3)", "--launches", "2"]) == 0
    )
    assert len(folders) == 8 and len(set(folders)) == 4
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]
    assert cells == [
        ["ALQ(bits=3)", "2", "20", "1", "0.2", "0.1"],
        ["ALQ(bits=3)", "4", "40", "2", "0.2", "0.1"],
    ]


def test_no_rank_is_refused(first_step, capsys):
    with pytest.raises(SystemExit):
        first_step.main(["--ranks", "0"])
    assert "--ranks: must be one or more, not 0" in capsys.readouterr().err
