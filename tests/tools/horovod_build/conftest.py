"""A made-up environment for the tests of the Horovod builder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hvd_adaptive.tools.install.environment import Facts, Gpu, Mpi, Options, Torch


@pytest.fixture
def facts() -> Facts:
    """A made-up environment with an MPI of its own."""
    mpi = Mpi(Path(sys.prefix) / "bin" / "mpicxx", "Open MPI 4.1.8")
    torch = Torch("2.13.0", None, 20)
    return Facts(Options(), torch, mpi, Gpu("CPU build"), ("avx", "f16c", "fma"))
