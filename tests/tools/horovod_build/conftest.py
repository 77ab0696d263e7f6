"""A made-up environment for the tests of the Horovod builder."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_adaptive.tools.install.cuda import Gpu
from hvd_adaptive.tools.install.environment import Facts, Mpi, Torch


@pytest.fixture
def facts(tmp_path: Path) -> Facts:
    """A made-up environment with an MPI of its own."""
    prefix = tmp_path / "env"
    return Facts(
        torch=Torch("2.13.0", None, 20),
        mpi=Mpi(prefix / "bin" / "mpicxx", "Open MPI", "4.1.8", (prefix / "lib",)),
        gpu=Gpu("CPU build"),
        prefix=prefix,
        site=prefix / "lib" / "python3.11" / "site-packages",
        scripts=prefix / "bin",
        cpu=("avx", "f16c", "fma"),
    )
