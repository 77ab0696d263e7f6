"""docs/architecture.md: its table names every module, and imports are as it says."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

import hvd_adaptive

PACKAGE = Path(hvd_adaptive.__file__).resolve().parent
PAGE = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"
HELPERS = {"settings", "states", "errors", "once", "device", "finite", "streams", "_version"}
# What each may import of this package, besides itself and the helpers, at most.
KNOWS = {
    "levels": set(),
    "coding": {"kernels"},
    "kernels": set(),
    "codec": {"coding", "kernels"},
    "exchange": {"coding", "kernels"},
    "monitor": set(),
    "statistics": {"levels", "kernels"},
    "schedule": set(),
    "feedback": set(),
    "theory": {"levels", "schemes"},
    "ddp": {"compressor", "fusion"},
    **{helper: {"coding"} for helper in sorted(HELPERS)},
}
HOROVOD = {
    "transport/world.py",
    "transport/mpi_messages.py",
    "elastic.py",
    "tools/bench/worker.py",
    "tools/doctor/worker.py",
    "tools/plan/worker.py",
}


def table() -> set[str]:
    """Modules in the table's first column."""
    section = PAGE.read_text(encoding="utf-8").split("## Who knows whom")[1]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name for cell in cells[:-1] for name in re.findall(r"`([\w.]+/?)`", cell)}


def imports(path: Path) -> set[str]:
    """Modules that a file imports when it runs, at any time; of its own package with a dot."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@functools.cache
def known() -> dict[str, set[str]]:
    """Modules of this package by those that import them."""
    tops = {path.stem for path in PACKAGE.iterdir()}
    graph: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        top = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        ours = {name.split(".")[1] for name in imports(path) if name.startswith("hvd_adaptive.")}
        graph.setdefault(top, set()).update((ours & tops) - {top})
    return graph


def test_every_module_has_a_line():
    here = {
        f"{path.name}/" if path.is_dir() else path.name
        for path in PACKAGE.iterdir()
        if not path.name.startswith("_")
        and (path.suffix == ".py" or (path / "__init__.py").exists())
    }
    assert table() >= here, here - table()


@pytest.mark.parametrize("module", KNOWS)
def test_it_knows_no_more_than_the_page_says(module):
    assert known()[module] <= KNOWS[module] | HELPERS


def test_nothing_below_knows_what_is_above():
    """Schemes are independent of how payloads travel, exchanges of Horovod's calls."""
    for below in ("levels", "coding", "kernels", "codec", "exchange", "theory", "statistics"):
        assert not known()[below] & {"fusion", "compressor", "simulate", "ddp", "monitor"}
    assert not known()["schemes"] & {"fusion", "exchange", "simulate"}
    assert not known()["monitor"] & {"fusion", "schemes"}


def test_horovod_and_mpi_are_imported_where_the_page_says():
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if any(name.split(".")[0] in ("horovod", "mpi4py") for name in imports(path))
    }
    assert found <= HOROVOD
    assert {"transport/world.py", "elastic.py"} <= found
