"""The smaller examples, shortened, on two ranks: see example_runs.py and torchrun_examples.py."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import forked
import pytest
from script_runs import ROOT
from torch.distributed import TCPStore

pytestmark = [pytest.mark.integration, pytest.mark.parallel, pytest.mark.timeout(320)]


def test_examples_on_two_ranks(tmp_path: Path) -> None:
    """One start for all of them: most of an example's time is its imports."""
    pytest.importorskip("mlxtend")
    program = Path(__file__).parent / "example_runs.py"
    told = forked.run(2, program, [str(tmp_path)], {}, tmp_path, 300)
    assert told.count("all examples ran") == 2


def test_elastics_page_has_the_command_of_its_docstring() -> None:
    """test_examples_on_two_ranks runs it without horovodrun, and tests/parallel/test_elastic.py
    starts horovodrun in this way."""
    text = (ROOT / "examples/elastic.py").read_text(encoding="utf-8")
    documented = re.search(r"^horovodrun.*?elastic\.py$", text, re.MULTILINE | re.DOTALL)[0]
    command = shlex.join(shlex.split(documented.replace("\\\n", "")))
    assert f"`{command}`" in (ROOT / "docs/examples.md").read_text(encoding="utf-8")


def test_examples_of_torchrun(tmp_path: Path) -> None:
    """One start for all of them. (tests/parallel/test_docs_blocks.py starts the tutorial's script
    by torchrun itself.)"""
    pytest.importorskip("mlxtend")
    program = Path(__file__).parent / "torchrun_examples.py"
    # One for each example, as torchrun makes it for the processes that it starts.
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(4)]
    ports = [str(store.port) for store in stores]
    told = forked.run(2, program, ports, {}, tmp_path, 300)
    assert told.count("all examples ran") == 2
