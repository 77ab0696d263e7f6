"""docs/compatibility.md: every line names tests, and every test it names exists."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "compatibility.md"
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)(\[[^`]*\])?`")


def rows() -> list[list[str]]:
    """Cells of the tables' lines, without heads."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:2] == "| "]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in cells if row[0] not in ("What", "---")]


@functools.cache
def functions(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:40])
def test_named_tests_exist(row):
    _, result, shown = row
    assert re.match(r"works|refused|error|documented|limits", result), result
    found = TEST.findall(shown)
    assert found, "no test is named"
    assert len(found) == shown.count("::"), "a test's name is not understood"
    for file, name, case in found:
        assert name.startswith("test_") and name in functions(ROOT / file), (file, name)
        text = (ROOT / file).read_text(encoding="utf-8")
        assert all(word in text for word in re.findall(r"\w+", case)), (name, case)


def test_the_page_has_a_line_for_everything():
    assert len(rows()) >= 50
