"""Postpone Python's garbage collection while modules and kernels are loaded."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_gc() -> Iterator[None]:
    """Collect no garbage within the block.

    Imports make many objects, all of which stay, so that Python collects again and again. In a
    process with torch a full collection takes longer than loading a kernel.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
