"""A module imports only what is above it in docs/architecture.md; no file is in a circle."""

from __future__ import annotations

import functools
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from imported_names import imported

import hvd_adaptive

PACKAGE = Path(hvd_adaptive.__file__).resolve().parent
PAGE = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"
HOROVOD = {"transport/horovod_world.py", "hooks/horovod/elastic.py"}


def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports(path: Path, known: dict[str, Path]) -> set[str]:
    found = set()
    for name in imported(path):
        while name and name not in known:
            name = name.rpartition(".")[0]
        found.add(name)
    return found - {""}


@functools.cache
def graph() -> dict[str, set[str]]:
    known = modules()
    return {name: imports(path, known) - {name} for name, path in known.items()}


def top(module: str) -> str:
    """The table's name of a module: its folder, or its file, directly in the package."""
    parts = module.split(".")
    if len(parts) == 1:
        return "__init__.py"
    folder = (PACKAGE / parts[1]).is_dir()
    return f"{parts[1]}/" if folder else f"{parts[1]}.py"


def table() -> list[str]:
    """The first column of the page's table, in its order."""
    section = PAGE.read_text(encoding="utf-8").split("## Modules, bottom to top")[1]
    rows = section.split("\n## ")[0].splitlines()
    cells = [line.split("|")[1] for line in rows if line.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`([\w.]+/?)`", cell)]


def test_no_file_is_in_a_circle():
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_modules_import_only_what_is_above_them_in_the_table():
    order = table()
    assert sorted(order) == sorted({top(name) for name in modules()})
    wrong = [
        f"{name} imports {other}"
        for name, others in graph().items()
        for other in others
        if order.index(top(other)) > order.index(top(name))
    ]
    assert wrong == []


def test_backends_import_no_other_backend():
    """The registry loads backends by name; files that they share import none of them."""
    for name, others in graph().items():
        parts = name.split(".")
        if parts[1:2] == ["kernels"] and parts[-1] != "__main__":
            backends = {o.split(".")[2] for o in others if o.startswith("hvd_adaptive.kernels.")}
            backends &= {"numba", "reference", "triton"}
            assert backends <= set(parts[2:3]), name


def test_horovod_and_mpi_are_imported_where_the_page_says():
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if any(name.split(".")[0] in ("horovod", "mpi4py") for name in imported(path))
    }
    ranks = {path for path in found if path.startswith("tools/") and path.endswith("/worker.py")}
    assert found == HOROVOD | ranks and len(ranks) == 3
