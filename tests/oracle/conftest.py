"""Hypothesis runs the same examples each time, without deadlines or a database on disk."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "oracle", deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
settings.load_profile("oracle")
torch.set_num_threads(1)
