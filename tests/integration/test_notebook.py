"""The notebook on simulate runs from top to bottom, and is stored without outputs."""

from __future__ import annotations

import json

import pytest
from script_runs import ROOT

NOTEBOOK = ROOT / "examples" / "simulate.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
MOST_CELLS = 14


@pytest.mark.integration
def test_its_cells_run_in_order(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """In one namespace, as in Jupyter; what it prints and draws has the expected parts."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib").use("agg")
    names: dict = {"__name__": "__main__"}
    for number, cell in enumerate(CELLS):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    told = capsys.readouterr().out
    assert told.count("accuracy") == len(names["runs"]) == 4
    assert told.count("mean relative error") == 4
    reached = {name: run.column("validation_accuracy")[-1] for name, run in names["runs"].items()}
    assert min(reached.values()) > 0.8
    left, right = names["figure"].axes
    assert len(left.lines) == 4 and len(right.collections) == len(names["tables"]) > 1


def test_it_is_short_and_has_no_outputs() -> None:
    assert len(CELLS) <= MOST_CELLS
    for cell in CELLS:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
