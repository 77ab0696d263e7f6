"""The smaller examples, shortened, on two ranks: see example_runs.py and torchrun_examples.py."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import forked
import pytest
from script_runs import ROOT, run
from torch.distributed import TCPStore

pytestmark = [pytest.mark.integration, pytest.mark.parallel, pytest.mark.timeout(320)]


def test_examples_on_two_ranks(tmp_path: Path) -> None:
    """One start for all of them: most of an example's time is its imports."""
    pytest.importorskip("mlxtend")
    program = Path(__file__).parent / "example_runs.py"
    told = forked.run(2, program, [str(tmp_path)], {}, tmp_path, 300)
    assert told.count("all examples ran") == 2


def elastic_command() -> list[str]:
    """The command of its docstring, which is the page's."""
    text = (ROOT / "examples/elastic.py").read_text(encoding="utf-8")
    documented = re.search(r"^horovodrun.*?elastic\.py$", text, re.MULTILINE | re.DOTALL)[0]
    return shlex.split(documented.replace("\\\n", ""))


def test_elastics_page_has_its_command() -> None:
    page = (ROOT / "docs/examples.md").read_text(encoding="utf-8")
    assert f"`{shlex.join(elastic_command())}`" in page


@pytest.mark.thorough
def test_elastic_as_documented(tmp_path: Path) -> None:
    """Until the stop file is seen. (test_examples_on_two_ranks runs it without horovodrun, and
    tests/parallel/test_elastic.py starts horovodrun in this way.)"""
    pytest.importorskip("mlxtend")
    command = elastic_command()
    hosts = tmp_path / "hosts.sh"
    hosts.write_text("#!/bin/sh\necho localhost:2\n")
    hosts.chmod(0o755)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "stop").touch()
    done = run([*command, "--no-cuda", "--stop-file", "stop"], tmp_path, 120)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("a worker has started") == 2
    assert "stopped after step 5, 2 ranks" in done.stdout


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
