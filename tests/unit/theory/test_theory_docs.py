"""The page on theory: its examples run, its figures are right, it names every public function."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from hvd_adaptive import theory

PAGE = Path(__file__).parents[3] / "docs" / "theory.md"


def test_examples_of_the_page():
    result = doctest.testfile(str(PAGE), module_relative=False, encoding="utf-8")
    assert result.attempted > 40
    assert result.failed == 0


@pytest.mark.parametrize("name", [name for name, value in vars(theory).items() if callable(value)])
def test_page_names_and_runs(name):
    text = PAGE.read_text(encoding="utf-8")
    examples = "\n".join(line for line in text.splitlines() if line.startswith((">>>", "...")))
    assert re.search(rf"`{name}\b", text)
    if name != "Guarantee":
        assert re.search(rf"\btheory\.{name}\b", examples)


def test_tests_that_the_page_names_exist():
    text = PAGE.read_text(encoding="utf-8")
    tests = "\n".join(file.read_text() for file in Path(__file__).parent.glob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", text)
    assert len(named) >= 5
    for name in named:
        assert f"def {name}(" in tests


def test_files_that_the_page_names_exist():
    """A row's formula is in the one, and tested in the other."""
    text = PAGE.read_text(encoding="utf-8")
    rows = text.partition("## Formulas, their code")[2].partition("\n## ")[0]
    tests = re.findall(r"`((?:\w+/)?test_\w+\.py)`", rows)
    sources = set(re.findall(r"`([\w/]+\.py)`", rows)) - set(tests)
    assert len(tests) > 15 and len(sources) > 12
    for name in tests:
        assert (PAGE.parents[1] / "tests" / "unit" / name).is_file(), name
    for name in sources:
        folder = (
            PAGE.parents[1] if name.startswith("research/") else Path(theory.__file__).parents[1]
        )
        assert (folder / name).is_file(), name
