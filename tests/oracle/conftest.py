"""Hypothesis runs the same examples each time, without deadlines or a database on disk."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings

# As tests/unit/conftest.py: the last profile that is loaded holds for all tests of a run.
settings.register_profile(
    "repeatable",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("repeatable")
torch.set_num_threads(1)
