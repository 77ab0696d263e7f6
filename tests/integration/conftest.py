"""Forked ranks are imported from tests/parallel."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "parallel"))
