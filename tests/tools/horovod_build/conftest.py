"""Made-up environments for the tests of the Horovod builder."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hvd_adaptive.tools.install import preflight
from hvd_adaptive.tools.install.environment import Facts, Gpu, Mpi, Options, Torch


@pytest.fixture
def facts() -> Facts:
    """An environment with an MPI of its own."""
    mpi = Mpi(Path(sys.prefix) / "bin" / "mpicxx", "Open MPI 4.1.8")
    torch = Torch("2.13.0", None, 20)
    return Facts(Options(), torch, mpi, Gpu("CPU build"), ("avx", "f16c", "fma"))


@pytest.fixture
def tools(monkeypatch) -> None:
    """What a build needs is there."""
    monkeypatch.setattr(preflight, "problems", lambda standard, mpi: [])
    monkeypatch.setattr(preflight, "find_compiler", lambda: ["g++"])
    monkeypatch.setattr(shutil, "which", lambda name, path=None: f"/bin/{name}")


@pytest.fixture
def file(tmp_path) -> Callable[..., Path]:
    """Write a program, or another text, and the folders above it."""

    def write(name: str, text: str = "") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    return write
