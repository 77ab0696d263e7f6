"""The oracle shares nothing with the package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from imported_names import imported

FOLDER = Path(__file__).parent
READER = FOLDER.parent / "wire_decoder.py"
MODULES = [p for p in FOLDER.glob("*.py") if not p.name.startswith(("test_", "conftest"))]
# What more than NumPy and the standard library a module may import.
MORE = {"oracle", "wire_decoder", "torch", "hypothesis"}
LAWS = ("laws", "projected", "averages", "bounds", "verdict", "rounding", "rotated")


@pytest.mark.parametrize("path", [*MODULES, READER], ids=lambda path: path.name)
def test_nothing_of_the_package_is_imported(path):
    more = {"oracle", "wire_decoder"} if path.stem in LAWS else set() if path == READER else MORE
    tops = {name.partition(".")[0] for name in imported(path)}  # "" of a relative import
    assert tops <= {"numpy", *more, *sys.stdlib_module_names}
    text = path.read_text(encoding="utf-8")
    assert "import_module" not in text and "__import__" not in text
