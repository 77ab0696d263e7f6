"""Every block of code in README.md and docs/ runs, or says why it cannot."""

from __future__ import annotations

import re
from pathlib import Path

import forked
import pytest
from page_blocks import OTHERS, PYTHON, SHELL, Block, blocks, pages, to_run
from script_runs import BIN, ROOT, run

ALL = [block for page in pages() for block in blocks(page)]
# theory.md's examples are checked, figures included, by tests/unit/theory/test_theory_docs.py.
DOCTESTS = {"theory.md"}
# More than these must not hide behind a comment; measurements need a quiet machine, and are apart.
MOST_NOT_RUN = 17
MEASUREMENT = re.compile(r"python (benchmarks/\w+\.py)((?:[^\n]*\\\n)*[^\n]*)")
OPTION = re.compile(r"--[a-z][a-z-]*")
TUTORIAL = ROOT / "docs/tutorial.md"
# Saved by a reader of the tutorial before the shell's block that starts it.
SCRIPTS = {
    "train.py": next(b for b in blocks(TUTORIAL) if b.language in PYTHON),
    "train_horovod.py": to_run(TUTORIAL)[0],
}
# test_python_blocks runs the script that horovodrun starts, and doctor's test starts horovodrun.
SHELL_BLOCKS = [
    pytest.param(b, id=str(b), marks=[pytest.mark.thorough] * b.code.startswith("horovodrun"))
    for b in ALL
    if b.language in SHELL and b.reason is None
]


def test_blocks_are_of_a_known_kind_and_few_are_not_run() -> None:
    for block in ALL:
        assert block.language in (*PYTHON, *SHELL, *OTHERS), block
        assert not block.is_doctest or block.page.name in DOCTESTS, block
        if block.reason is not None:
            assert block.language in (*PYTHON, *SHELL), block
            assert len(block.reason.split()) >= 4, f"{block}: the reason is none"
    for page in pages():
        text = page.read_text(encoding="utf-8")
        assert text.count("<!-- not run:") == sum(b.reason is not None for b in blocks(page)), page
        assert text.count("```") == 2 * len(blocks(page)), page
    not_run = [block for block in ALL if block.reason is not None]
    assert sum(not MEASUREMENT.search(block.code) for block in not_run) <= MOST_NOT_RUN


def test_measurements_have_these_options() -> None:
    asked: dict[str, set[str]] = {}
    for block in ALL:
        for script, arguments in MEASUREMENT.findall(block.code):
            asked.setdefault(script, set()).update(OPTION.findall(arguments))
    shared = "".join(path.read_text() for path in (ROOT / "hvd_adaptive/tools").rglob("*.py"))
    shared += "".join(path.read_text() for path in (ROOT / "benchmarks").rglob("*/*.py"))
    for script, options in asked.items():
        text = shared + (ROOT / script).read_text()
        assert not [option for option in options if f'"{option}"' not in text], script


@pytest.mark.parallel
@pytest.mark.timeout(200)
def test_python_blocks(tmp_path: Path) -> None:
    """On two ranks, all pages in one launch."""
    program = Path(__file__).parent / "page_blocks.py"
    told = forked.run(2, program, [str(tmp_path)], {}, tmp_path, 180)
    for block in (block for page in pages() for block in to_run(page)):
        assert told.count(f"ran {block}\n") == 2, block


@pytest.mark.timeout(220)
@pytest.mark.parametrize("block", SHELL_BLOCKS)
def test_shell_blocks(block: Block, tmp_path: Path) -> None:
    """In a folder of their own, with the repository's files in it, and the tutorial's scripts."""
    for name in ("examples", "research", "benchmarks", "slurm", "docs", "tests", "hvd_adaptive"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name, script in SCRIPTS.items():
        (tmp_path / name).write_text(script.code)
    code = f"export VIRTUAL_ENV={BIN.parent}\n{block.code}"
    run(["bash", "-euo", "pipefail", "-c", code], tmp_path, 200)
