"""The smaller examples, shortened, on two ranks (example_runs.py); the
notebook on simulate runs from top to bottom, and is stored without outputs."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import forked
import pytest
from script_runs import ROOT
from torch.distributed import TCPStore

pytestmark = [pytest.mark.integration, pytest.mark.parallel, pytest.mark.timeout(320)]


def test_examples_on_two_ranks(tmp_path: Path) -> None:
    """One start for all of them: most of an example's time is its imports.
    (tests/parallel/test_docs_blocks.py starts the tutorial's script by torchrun itself.)"""
    pytest.importorskip("mlxtend")
    program = Path(__file__).parent / "example_runs.py"
    # One for each of four examples, as torchrun makes it for the processes that it starts.
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(4)]
    ports = [str(store.port) for store in stores]
    told = forked.run(2, program, [str(tmp_path), *ports], {}, tmp_path, 300)
    assert told.count("all examples ran") == 2


def test_elastics_page_has_the_command_of_its_docstring() -> None:
    """test_examples_on_two_ranks runs it without horovodrun, and tests/parallel/test_elastic.py
    starts horovodrun in this way."""
    text = (ROOT / "examples/elastic.py").read_text(encoding="utf-8")
    documented = re.search(r"^horovodrun.*?elastic\.py$", text, re.MULTILINE | re.DOTALL)[0]
    command = shlex.join(shlex.split(documented.replace("\\\n", "")))
    assert f"`{command}`" in (ROOT / "docs/examples.md").read_text(encoding="utf-8")


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
