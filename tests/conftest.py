"""The order of the suite."""

from __future__ import annotations

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The file that takes longest begins, lest all others wait for it at the end."""
    items.sort(key=lambda item: item.path.name != "test_ranks.py")
