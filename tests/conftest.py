"""Let tests be repeatable; leave those marked ``thorough``, and most cases of those marked
``many``, to `make ranks`."""

from __future__ import annotations

import os
import zlib
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, settings

from hvd_adaptive import instances

EVERY = "HVD_ADAPTIVE_EVERY_CASE" in os.environ
SHARE = 3  # of ``many`` cases the first and one in so many

# Hypothesis runs the same examples each time, without deadlines or a database on disk.
settings.register_profile(
    "repeatable",
    # Of tests that name no number. `make ranks` draws as many as Hypothesis does.
    max_examples=100 if EVERY else 50,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("repeatable")
torch.set_num_threads(1)  # tests run side by side
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first loaded


@pytest.fixture(autouse=True)
def first_compressors():
    """Give each test's first compressor the random numbers of a process's first one."""
    instances.start_over()


@pytest.fixture
def said(caplog):
    """Messages with these words that have been logged."""
    return lambda words: [message for message in caplog.messages if words in message]


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
