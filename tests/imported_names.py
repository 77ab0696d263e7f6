"""What a file imports, by its syntax."""

from __future__ import annotations

import ast
from pathlib import Path


def imported(path: Path) -> list[str]:
    """Dotted names of all imports, those in functions and for type checkers, too."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            before = "." * node.level + (node.module or "")
            found += [f"{before}.{alias.name}" for alias in node.names]
    return found
