"""LeNet and its images, from ``examples/lenet.py``: one file that both folders use."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

from lenet import DEVIATION, MEAN, LeNet, read_images, split

__all__ = ["DEVIATION", "MEAN", "LeNet", "read_images", "split"]
