"""Leave tests marked ``thorough``, and most cases of those marked ``many``, to `make ranks`."""

from __future__ import annotations

import os
import zlib
from collections import Counter

EVERY = "HVD_ADAPTIVE_EVERY_CASE" in os.environ
SHARE = 3  # of ``many`` cases the first and one in so many


def pytest_collection_modifyitems(config, items):
    """Deselect what repeats other tests on a larger scale, unless every case is wanted."""
    if EVERY:
        return
    left, seen = set(), Counter()
    for item in items:
        if item.get_closest_marker("thorough"):
            left.add(item)
        elif item.get_closest_marker("many"):
            test = item.path, item.originalname
            # Drawn, so that no parameter keeps one value throughout.
            if seen[test] and zlib.crc32(item.name.encode()) % SHARE:
                left.add(item)
            seen[test] += 1
    if left:
        config.hook.pytest_deselected(items=[item for item in items if item in left])
        items[:] = [item for item in items if item not in left]
