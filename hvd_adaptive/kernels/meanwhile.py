"""Run a kernel's plain-torch reference while the fast kernel is compiled.

Compiling takes seconds, and training need not wait for it: both backends compute the same bits. In
a training run (``allow``) a kernel that is not there raises ``Missing`` within ``or_reference``,
which then calls the reference. The kernel is compiled on another thread (numba/host_cache.py). All
other calls, as of tests and of benchmarks of kernels, wait for the fast kernel.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from hvd_adaptive import kernels
from hvd_adaptive.variables import WAIT

Function = TypeVar("Function", bound=Callable[..., Any])


class Missing(Exception):
    """The kernel is being compiled."""


class _Thread(threading.local):
    """State of a thread. waits: see ``waiting``. replaceable: a call has a reference."""

    waits = False
    replaceable = False


_thread = _Thread()
_allowed: list[bool] = []


def allow() -> None:
    """Run references from now on while kernels are compiled."""
    if not _allowed and not os.environ.get(WAIT):
        _allowed.append(True)


def may_be_missing() -> bool:
    """Return whether the kernel that this thread calls may raise ``Missing``."""
    return _thread.replaceable


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Compile kernels on this thread within the block, whatever is allowed."""
    before, _thread.waits = _thread.waits, True
    try:
        yield
    finally:
        _thread.waits = before


def or_reference(subject: str) -> Callable[[Function], Function]:
    """Call the reference's function of the same name if a fast kernel is ``Missing``.

    A function that is decorated can be called again after its kernel was missing: it changes no
    argument before, or the reference overwrites the change.

    Args:
        subject: The function's, in ``kernels.SUBJECTS``.
    """

    def decorated(fast: Function) -> Function:
        @functools.wraps(fast)
        def call(*arguments: Any, **keywords: Any) -> Any:
            if not _allowed or _thread.waits:
                return fast(*arguments, **keywords)
            _thread.replaceable = True
            try:
                return fast(*arguments, **keywords)
            except Missing:
                pass
            finally:
                _thread.replaceable = False
            slow = getattr(kernels.module("reference", subject), fast.__name__)
            return slow(*arguments, **keywords)

        return cast(Function, call)

    return decorated
