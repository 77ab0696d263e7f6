"""Compile each kernel once on a host: one process compiles it, the others wait and load it.

Numba caches a kernel's machine code in a folder, but does not keep processes from compiling the
same kernel at the same time: all ranks start together, and would each compile everything. Here a
process takes a file lock before it compiles. A process that waits for a lock compiles other kernels
that it will need (``expecting``), so that the ranks of a host share the work. If a call has a
reference (kernels/meanwhile.py), one thread does all this in the background.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from numba.core.runtime import rtsys

from hvd_adaptive.kernels import meanwhile
from hvd_adaptive.kernels.collector import postponed

logger = logging.getLogger("hvd_adaptive")

REMEDY = "set the environment variable NUMBA_CACHE_DIR to a folder that can be written"
LONG = 1.0  # seconds of compiling, after which a line is logged
LONGEST = 300.0  # seconds that a process waits for another one before it compiles itself
PAUSE = 0.01  # seconds between looks at a lock
LOCAL_RANK = ("OMPI_COMM_WORLD_LOCAL_RANK", "HOROVOD_LOCAL_RANK", "LOCAL_RANK", "SLURM_LOCALID")


class Busy(Exception):
    """Another process compiles this kernel, and this one has other work."""


class HostCache:
    """Numba's cache of one kernel; a process that compiles the kernel holds a lock meanwhile.

    Args:
        cache: Numba's ``FunctionCache``.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._held: contextlib.ExitStack | None = None
        self._waits = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def load_overload(self, signature: Any, target: Any) -> Any:
        """Return the cached kernel, or None if this process is to compile it.

        Raises:
            Busy: Another process compiles it, and this call is one of ``expecting``.
            Missing: It is not there, and this call has a reference.
        """
        found = self._loaded(signature, target)
        if found is None and _thread.misses:
            raise meanwhile.Missing
        if found is None and self._waits:
            raise Busy  # a call of ``expecting``, while this process waits for this very kernel
        if found is None and self._held is None:
            self._held = contextlib.ExitStack()
            self._held.enter_context(_notice.of(Path(self._cache.cache_path)))
            self._waits = True
            try:
                self._held.enter_context(_turn(self._lock_path()))
            finally:
                self._waits = False
            found = self._cache.load_overload(signature, target)
        return found

    def _loaded(self, signature: Any, target: Any) -> Any:
        """Return the cached kernel, or None.

        Numba first imports and registers everything that a compilation may use, which takes longer
        than all else in a first step. Machine code that is there already needs the runtime alone.
        """
        with postponed():
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

    def release(self) -> bool:
        """Let other processes compile, or load what this one has compiled; return whether this
        process had to wait or to compile."""
        held, self._held = self._held, None
        if held is not None:
            held.close()
        return held is not None

    def _lock_path(self) -> Path:
        return Path(self._cache.cache_path) / f"{self._cache._impl.filename_base}.lock"


def once_a_host(dispatcher: Any) -> Any:
    """Make a cached dispatcher of Numba's compile under the host's lock; return it."""
    cache = dispatcher._cache = HostCache(dispatcher._cache)
    compile_it = dispatcher.compile

    def compile_in_turn(signature: Any) -> Any:
        if meanwhile.may_be_missing() and not _background.has_failed(dispatcher, signature):
            return found_now(signature)
        was_missing = False
        with _one_at_a_time:
            try:
                entry = compile_it(signature)
            finally:
                was_missing = cache.release()
        if was_missing and not (_thread.working or _thread.holding):
            while _do_one(_expected()):
                pass
        return entry

    def found_now(signature: Any) -> Any:
        """Load the kernel. If that is not possible now, have it compiled and raise Missing."""
        if _one_at_a_time.acquire(blocking=False):
            _thread.misses = True
            try:
                return compile_it(signature)
            except meanwhile.Missing:
                pass
            finally:
                _thread.misses = False
                _one_at_a_time.release()
        _background.compile(dispatcher, signature)
        raise meanwhile.Missing

    dispatcher.compile = compile_in_turn
    return dispatcher


def expecting(calls: Callable[[], Iterable[Callable[[], object]]]) -> None:
    """Use ``calls`` from now on: it returns new calls of kernels that this process will need.

    They are done while this process waits for another one, and after it has compiled a kernel.
    """
    _sources[:] = [calls]


def warn_uncached(reason: str) -> None:
    """Warn, once, that compiled kernels are not kept."""
    if _warned:
        return
    _warned.append(reason)
    first = all(os.environ.get(name, "0") == "0" for name in LOCAL_RANK)
    logger.log(
        logging.WARNING if first else logging.DEBUG,
        "no folder keeps compiled kernels, so each process compiles them at every start, which "
        "takes some seconds: %s (%s)",
        REMEDY,
        reason,
    )


_sources: list[Callable[[], Iterable[Callable[[], object]]]] = []
_calls: list[Callable[[], object]] = []  # to do
_warned: list[str] = []


class _Thread(threading.local):
    """State of a thread. working: it does expected calls. holding: locks held. misses: it loads
    what is there, and compiles nothing."""

    working = False
    holding = 0
    misses = False


_thread = _Thread()
_one_at_a_time = threading.RLock()  # of threads that load or compile, as Numba itself demands


class _Background:
    """Compile kernels, one after the other, on a thread of this process."""

    def __init__(self) -> None:
        self._asked: set[tuple[int, Any]] = set()
        self._failed: set[tuple[int, Any]] = set()

    def has_failed(self, dispatcher: Any, signature: Any) -> bool:
        """Return whether the kernel could not be compiled; its next call raises the error."""
        return (id(dispatcher), signature) in self._failed

    def compile(self, dispatcher: Any, signature: Any) -> None:
        """Compile a kernel soon, once."""
        key = id(dispatcher), signature
        if key not in self._asked:
            self._asked.add(key)
            with contextlib.suppress(RuntimeError):  # the interpreter ends
                _compiler(os.getpid()).submit(self._compile, dispatcher, signature)

    def _compile(self, dispatcher: Any, signature: Any) -> None:
        try:
            with meanwhile.waiting():
                dispatcher.compile(signature)
        except BaseException as error:
            logger.debug("a kernel could not be compiled in the background: %r", error)
            self._failed.add((id(dispatcher), signature))


_background = _Background()


def _begin_anew() -> None:
    """Forget what a thread of the parent did; it is not in a forked process."""
    global _one_at_a_time, _background
    _one_at_a_time, _background = threading.RLock(), _Background()


os.register_at_fork(after_in_child=_begin_anew)


@functools.lru_cache(maxsize=1)
def _compiler(process: int) -> ThreadPoolExecutor:
    """Return the thread of this process. At exit Python waits for it: what it does is saved."""
    return ThreadPoolExecutor(1, thread_name_prefix="hvd_adaptive.compiler")


@contextlib.contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Hold the lock in the file ``path``, as no other process does, or none if there can be none.

    Raises:
        Busy: Another process holds it, and this thread should not wait.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:  # then Numba cannot save the kernel, either
        logger.debug("no lock in %s: %s", path, error)
        yield
        return
    with file:
        _wait_for(file)
        _thread.holding += 1
        try:
            yield
        finally:
            _thread.holding -= 1
            with contextlib.suppress(OSError):  # closing would leave it to processes forked since
                fcntl.flock(file, fcntl.LOCK_UN)


def _wait_for(file: Any) -> None:
    begin = time.monotonic()
    while not _taken(file):
        if _thread.working and not _thread.holding:
            raise Busy
        if time.monotonic() - begin > LONGEST:
            logger.debug("%s: locked for %.0f s; compiling without it", file.name, LONGEST)
            return
        # While this thread holds a kernel's lock, it compiles a helper of it, and only waits.
        if _thread.holding or not _do_one(_expected()):
            time.sleep(PAUSE)


def _taken(file: Any) -> bool:
    """Return whether this process now holds the lock, or locks do not work here."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a file system without locks
        logger.debug("%s: %s", file.name, error)
    return True


def _expected() -> list[Callable[[], object]]:
    """Return the calls that are still to do."""
    for source in _sources:
        _calls.extend(source())
    return _calls


def _do_one(calls: list[Callable[[], object]]) -> bool:
    """Do the first call that no other process does; return whether there was one."""
    _thread.working = True
    try:
        for call in list(calls):
            try:
                call()
            except Busy:
                continue
            with contextlib.suppress(ValueError):  # another thread has done it, too
                calls.remove(call)
            return True
    finally:
        _thread.working = False
    return False


class _Notice:
    """Log one line, in one process of the host, if compiling takes long."""

    def __init__(self) -> None:
        self._depth, self._spent, self._begun = 0, 0.0, 0.0
        self._timer: threading.Timer | None = None
        self._folder = Path()
        self._said: Any = (
            None  # the file whose lock shows other processes that this one has said it
        )

    def of(self, folder: Path) -> _Notice:
        """Return this notice, for kernels that are kept in ``folder``."""
        self._folder = folder
        return self

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1 and self._said is None:
            self._begun = time.monotonic()
            self._timer = threading.Timer(max(0.0, LONG - self._spent), self._say)
            self._timer.daemon = True
            self._timer.start()

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0 and self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._spent += time.monotonic() - self._begun

    def _say(self) -> None:
        try:
            self._said = (self._folder / "hvd_adaptive.notice.lock").open("a")
            fcntl.flock(self._said, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another process of this host logs the line
            return
        logger.warning(
            "compiling kernels for this processor, which takes some seconds, and steps are slower "
            "meanwhile; they are kept in %s for later runs (NUMBA_CACHE_DIR names another folder)",
            self._folder,
        )


_notice = _Notice()
