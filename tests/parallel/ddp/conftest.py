"""Fixtures of the checks of DistributedDataParallel."""

from __future__ import annotations

import pytest

from hvd_adaptive import instances


@pytest.fixture(autouse=True)
def first_compressors():
    """Each check's first compressor has the random numbers of a process's first one."""
    instances.start_over()
