"""Work on the parts of a payload, several at a time."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def mapped(function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """Return ``function`` of each item, in order; on several threads if torch uses them. If a call
    raises, no other runs any more when the caller sees the exception.
    """
    threads = min(torch.get_num_threads(), len(items))
    if threads <= 1:
        return map(function, items)
    pool = _pool(threads, os.getpid())
    futures = [pool.submit(function, item) for item in items]
    wait(futures)
    return (future.result() for future in futures)


@functools.lru_cache(maxsize=4)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Return the pool of this process: threads do not survive a fork."""
    return ThreadPoolExecutor(threads, thread_name_prefix="hvd_adaptive.coding")
