"""Kernels stand below coding and levels; their backends know what they share, not each other."""

from __future__ import annotations

import ast
from pathlib import Path

import hvd_adaptive

PACKAGE = Path(hvd_adaptive.__file__).parent
FILES = {
    ".".join(("hvd_adaptive", *path.relative_to(PACKAGE).with_suffix("").parts)): path
    for path in PACKAGE.rglob("*.py")
}
FILES = {name.removesuffix(".__init__"): path for name, path in FILES.items()}
BELOW = {"base", "settings"}


def imported(module: str) -> set[str]:
    """Modules of the package that a file imports, in functions and under TYPE_CHECKING, too."""
    found = set()
    for node in ast.walk(ast.parse(FILES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {name if name in FILES else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & set(FILES)


def packages(package: str) -> set[str]:
    """Packages that a package's files import."""
    own = [name for name in FILES if name.split(".")[1:2] == [package]]
    found = {name.split(".")[1] for module in own for name in imported(module) if "." in name}
    return found - {package}


def test_kernels_stand_below_coding_and_levels():
    assert packages("kernels") <= BELOW
    assert packages("coding") <= BELOW | {"kernels"}
    assert not packages("levels")


def test_backends_import_no_other_backend():
    """The registry loads backends by name; files that they share import none of them."""
    for module in FILES:
        parts = module.split(".")
        if parts[1:2] != ["kernels"] or parts[-1] == "__main__":
            continue
        own = parts[2] if len(parts) > 3 else None
        for name in imported(module):
            of = name.split(".")
            if of[1] == "kernels" and len(of) > 3:
                assert of[2] == own, (module, name)
