"""Averages of Horovod's optimizers beside exact ones."""

from __future__ import annotations

import pytest
from exact_averages import *  # noqa: F403

pytestmark = pytest.mark.gloo
