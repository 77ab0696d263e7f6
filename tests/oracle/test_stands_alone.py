"""The oracle shares nothing with the package."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
READER = FOLDER.parent / "wire_decoder.py"
MODULES = [*(p for p in FOLDER.glob("*.py") if not p.name.startswith("test_")), READER]
ALLOWED = {"numpy", "torch", "hypothesis", "oracle", "wire_decoder", *sys.stdlib_module_names}


def imported(path: Path) -> set[str]:
    """Top-level names of all imports, those inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.name}: relative imports hide what is imported"
            found.add((node.module or "").partition(".")[0])
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_nothing_of_the_package_is_imported(path):
    assert imported(path) <= ALLOWED
    assert "import_module" not in path.read_text(encoding="utf-8")
    assert "__import__" not in path.read_text(encoding="utf-8")


def test_laws_need_numpy_alone():
    laws = ("laws", "projected", "averages", "bounds", "verdict", "rounding", "rotated")
    for name in laws:
        assert imported(FOLDER / f"{name}.py") <= {"numpy", "oracle", *sys.stdlib_module_names}
