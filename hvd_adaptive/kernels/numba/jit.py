"""Configure Numba's compiler for this project: no fastmath, no GIL, cached, once on a host.

Numba caches a kernel's machine code in a folder, but does not keep processes from compiling the
same kernel at the same time: all ranks start together, and would each compile everything. Here a
process holds a lock on a file in that folder while it compiles a kernel; the others wait and load.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
from numba.core.runtime import rtsys

from hvd_adaptive.base.errors import WarnOnce
from hvd_adaptive.kernels import no_gc

logger = logging.getLogger("hvd_adaptive")

LONGEST = 300.0  # seconds that a process waits for another one before it compiles itself
PAUSE = 0.01  # seconds between looks at a lock
LOCAL_RANK = ("OMPI_COMM_WORLD_LOCAL_RANK", "HOROVOD_LOCAL_RANK", "LOCAL_RANK", "SLURM_LOCALID")
_OPTIONS = {"nogil": True, "error_model": "numpy", "fastmath": False, "boundscheck": False}
_HELPER = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, **_OPTIONS}


def jit(function: Callable) -> Callable:
    """Compile ``function`` on first use, once a host; cache it unless no folder can be written."""
    try:
        return once_a_host(numba.njit(function, cache=True, **_OPTIONS))
    except RuntimeError as error:  # Numba found no folder to cache in
        warn_uncached(str(error))
        return numba.njit(function, **_OPTIONS)


def inline(function: Callable) -> Callable:
    """Compile a helper that LLVM inlines into each kernel, so that constants reach its loops.

    Only kernels can call it: it has no entry for Python or C, which would take time to compile.
    """
    return numba.njit(function, forceinline=True, **_HELPER)


def outline(function: Callable) -> Callable:
    """Compile a helper as ``inline`` does, but once in each kernel, however often it is called."""
    return numba.njit(function, **_HELPER)


class HostCache:
    """Numba's cache of one kernel; a process that compiles the kernel holds a lock meanwhile.

    Args:
        cache: Numba's ``FunctionCache``.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._held: contextlib.ExitStack | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def load_overload(self, signature: Any, target: Any) -> Any:
        """Return the cached kernel, or None if this process is to compile it, with the lock."""
        found = self._loaded(signature, target)
        if found is None and self._held is None:
            folder = Path(self._cache.cache_path)
            _voice("compiling")(
                "compiling kernels for this processor, for up to half a minute; they are kept in "
                "%s for later runs (NUMBA_CACHE_DIR names another folder)",
                folder,
            )
            self._held = contextlib.ExitStack()
            self._held.enter_context(_turn(folder / f"{self._cache._impl.filename_base}.lock"))
            found = self._cache.load_overload(signature, target)
        return found

    def _loaded(self, signature: Any, target: Any) -> Any:
        """Return the cached kernel, or None.

        Numba first imports and registers everything that a compilation may use, which takes longer
        than all else in a first step. Machine code that is there already needs the runtime alone.
        """
        with no_gc():
            try:
                rtsys.initialize(target)
                return self._cache._load_overload(signature, target)
            except AttributeError:  # another version of Numba
                return self._cache.load_overload(signature, target)

    def save_overload(self, signature: Any, data: Any) -> None:
        """Keep a compiled kernel. If the folder cannot be written, only later runs notice."""
        try:
            self._cache.save_overload(signature, data)
        except OSError as error:
            warn_uncached(str(error))

    def release(self) -> None:
        """Let other processes compile, or load what this one has compiled."""
        held, self._held = self._held, None
        if held is not None:
            held.close()


def once_a_host(dispatcher: Any) -> Any:
    """Make a cached dispatcher of Numba's compile under the host's lock; return it."""
    cache = dispatcher._cache = HostCache(dispatcher._cache)
    compile_it = dispatcher.compile

    def compile_in_turn(signature: Any) -> Any:
        with _one_at_a_time:
            try:
                return compile_it(signature)
            finally:
                cache.release()

    dispatcher.compile = compile_in_turn
    return dispatcher


def warn_uncached(reason: str) -> None:
    """Warn, once, that compiled kernels are not kept."""
    _voice("uncached")(
        "no folder keeps compiled kernels, so each process compiles them at every start, which "
        "takes some seconds: set the environment variable NUMBA_CACHE_DIR to a folder that can be "
        "written (%s)",
        reason,
    )


@functools.cache
def _voice(of: str) -> WarnOnce:
    """Return what logs a warning ``of`` something once, on one rank of a host, and not in its child
    processes.
    """
    first = all(os.environ.get(name, "0") == "0" for name in LOCAL_RANK)
    return WarnOnce(logger, first and multiprocessing.parent_process() is None)


_one_at_a_time = threading.RLock()  # of threads that load or compile, as Numba itself demands


def _begin_anew() -> None:
    """Forget a lock that a thread of the parent holds, and that the parent may warn."""
    global _one_at_a_time
    _one_at_a_time = threading.RLock()
    _voice.cache_clear()


os.register_at_fork(after_in_child=_begin_anew)


@contextlib.contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Hold the lock in the file ``path``, or none if there can be no such file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:  # then Numba cannot save the kernel, either
        logger.debug("no lock in %s: %s", path, error)
        yield
        return
    with file:
        begin = time.monotonic()
        while not _taken(file) and time.monotonic() - begin < LONGEST:
            time.sleep(PAUSE)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # closing would leave it to processes forked since
                fcntl.flock(file, fcntl.LOCK_UN)


def _taken(file: Any) -> bool:
    """Return whether this process now holds the lock, or locks do not work here."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a file system without locks
        logger.debug("%s: %s", file.name, error)
    return True
