"""Settings that make a run of the tests repeatable."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

from hvd_adaptive import instances


def settle() -> None:
    """Let Hypothesis run the same examples each time, without deadlines or a database on disk, and
    Triton's kernels in its interpreter if there is no GPU. Use one core a process."""
    settings.register_profile(
        "repeatable",
        # Of tests that name no number. `make ranks` draws as many as Hypothesis does.
        max_examples=100 if "HVD_ADAPTIVE_EVERY_CASE" in os.environ else 50,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
    settings.load_profile("repeatable")
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first loaded


@pytest.fixture(autouse=True)
def first_compressors():
    """Give each test's first compressor the random numbers of a process's first one."""
    instances.start_over()
