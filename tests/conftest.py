"""Leave tests marked ``thorough`` to `make ranks`."""

from __future__ import annotations

import os

EVERY = "HVD_ADAPTIVE_EVERY_CASE" in os.environ


def pytest_collection_modifyitems(config, items):
    """Deselect what repeats other tests on a larger scale, unless every case is wanted."""
    left = [] if EVERY else [item for item in items if item.get_closest_marker("thorough")]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]
