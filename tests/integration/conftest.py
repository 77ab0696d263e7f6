"""One core a process, since tests run side by side."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

torch.set_num_threads(1)
sys.path.append(str(Path(__file__).parents[1] / "parallel"))  # forked ranks
