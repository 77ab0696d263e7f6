"""Provide Monitor, which records what a compressor does."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvd_adaptive.base.checks import check_flag, check_has, check_integer, check_number
from hvd_adaptive.monitor.alarms import Alarms
from hvd_adaptive.monitor.log import JsonLines, PythonLog, Sink, TensorBoard, new_tables
from hvd_adaptive.monitor.meter import Means

logger = logging.getLogger("hvd_adaptive")


class Monitor:
    """Recorder of what a compressor sends and how accurate it is.

    Use it as ``ALQ(monitor=Monitor("runs/1"))``, on all ranks or on some: without ``compare`` it
    joins no collective. One monitor may serve several compressors. A record holds means over the
    steps since the previous one.

    Args:
        folder: JSON lines are written to a new file in this folder, or appended to this file
            (".jsonl"). ``hvd-adaptive report FOLDER`` makes a page of them. None writes no file.
        every: Steps between two records.
        log: Whether to write records also to the logger "hvd_adaptive", at level INFO.
        tensorboard: A ``torch.utils.tensorboard.SummaryWriter``, which the caller closes.
        sinks: Objects with ``write(record)``, ``flush()`` and ``close()``, which receive every
            record (docs/monitoring.md). A sink that raises an exception is dropped with a warning,
            and training continues.
        ranks: Ranks (of the compressor's process set) that record, or "all".
        name: Prefix of file names and of TensorBoard's tags.
        error_limit: Warn once if the relative squared error over 50 steps exceeds it; None never
            warns.
        non_finite_limit: Warn once if more than this share of averaged buckets is not finite over
            50 steps; None never warns.
        warn_slow: Warn once if float32 would have been faster (docs/monitoring.md).
        compare: Measure at the end of the first step, and again when ranks change, how long stock
            float32 and float16 take to average tensors of the gradients' sizes. The report
            estimates the same step with them. Every rank must have a monitor with ``compare=True``,
            or none; otherwise the first step raises RankMismatchError. Ranks wait for each other in
            it, so with several optimizers their first steps must have the same order on all ranks.
            It takes twelve exchanges, and as much memory as one and a half times the gradients
            while it lasts.

            Measured are these exchanges, each alone, and in training the step and the time that
            its thread spends in this package. The step with stock float32 or float16 is estimated:
            the step, without the time in this package, and with their exchange. It takes at most
            that long, if nothing of their exchange overlaps with the backward pass. It takes at
            least so much less as passes from the first gradient to the last. Waiting for slower
            ranks before the exchange counts as the step's own time.

    Raises:
        ValueError: A value is not allowed.

    If a file cannot be written, now or later, the monitor warns once and training continues without
    it.

    Examples:
        >>> from hvd_adaptive import ALQ, Monitor
        >>> monitor = Monitor("runs/1", every=10)
        >>> compressor = ALQ(bits=3, monitor=monitor)
        >>> monitor.close()  # at the end; ``hvd-adaptive report runs/1`` draws the run
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        every: int = 10,
        log: bool = False,
        tensorboard: Any = None,
        sinks: Collection[Sink] = (),
        ranks: Collection[int] | str = (0,),
        name: str = "gradients",
        error_limit: float | None = 1.0,
        non_finite_limit: float | None = 0.2,
        warn_slow: bool = True,
        compare: bool = False,
    ) -> None:
        self._folder = _checked_folder(folder)
        self._every = check_integer("every", every, 1)
        self._log = check_flag("log", log)
        writer = "a torch.utils.tensorboard.SummaryWriter"
        self._writer = check_has("tensorboard", tensorboard, "add_scalar", writer)
        self._own = _checked_sinks(sinks)
        self._every_rank = isinstance(ranks, str) and ranks == "all"
        if not self._every_rank and (isinstance(ranks, str) or not isinstance(ranks, Collection)):
            raise ValueError(f"ranks={ranks!r}: must be a collection of ranks, or 'all'")
        numbers = () if self._every_rank else ranks
        self._ranks = frozenset(check_integer("ranks: rank", rank, 0) for rank in numbers)
        if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]*", name):
            allowed = "letters, digits, '_', '-' and '.' only"
            raise ValueError(f"name={name!r}: must begin a file name: {allowed}")
        self._name = name
        limits = {"error_limit": error_limit, "non_finite_limit": non_finite_limit}
        self._limits = [
            check_number(name, limit, "a number of 0 or more", lambda x: 0 <= x < math.inf)
            for name, limit in limits.items()
        ]
        self._warn_slow = check_flag("warn_slow", warn_slow)
        self.compare = check_flag("compare", compare)
        self._sinks: list[Sink] | None = None
        self._sources: weakref.WeakKeyDictionary[Any, _Source] = weakref.WeakKeyDictionary()
        self._known = 0
        self._lock = threading.RLock()  # optimizers may step in several threads

    def watches(self, rank: int) -> bool:
        """Return whether this rank records."""
        return self._every_rank or rank in self._ranks

    def flush(self) -> None:
        """Write what is buffered."""
        with self._lock:
            self._to_sinks(lambda sink: sink.flush())

    def close(self) -> None:
        """Write pending records and close the files, also at exit; later records reopen them."""
        with self._lock:
            for source in list(self._sources.values()):
                self._record(source)
            self._to_sinks(lambda sink: sink.close())

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Called by the session ------------------------------------------------------------------------

    def begin(self, compressor: Any, facts: Mapping[str, Any]) -> None:
        """Set the compressor's groups for all following figures: see run/monitored.py."""
        with self._lock:
            source = self._source(compressor)
            self._record(source)
            source.facts = dict(facts)
            source.means, source.versions = None, {}
            # "auto" has measured it.
            source.alarms.compares = self._warn_slow and facts["exchange"] != "auto"
            self._write(source, "start", facts)

    def stock(self, compressor: Any, ranks: Any) -> dict[str, float] | None:
        """Return what ``keep_stock`` was given for these ranks, or None."""
        with self._lock:
            kept, seconds = self._source(compressor).stock
            return seconds if kept == ranks else None

    def keep_stock(self, compressor: Any, ranks: Any, seconds: Mapping[str, float]) -> None:
        """Keep the seconds of stock exchanges between these ranks, by name."""
        with self._lock:
            self._source(compressor).stock = ranks, dict(seconds)

    def step(self, compressor: Any, number: int) -> None:
        """Record the compressor's last figures at the end of a step."""
        with self._lock:
            begin, source = time.perf_counter(), self._source(compressor)
            meter = compressor._training.meter
            for table in new_tables(compressor.parts, source.versions):
                self._write(source, "table", {"step": number} | table)
            version = max(codec.table_version for codec in compressor.parts.values())
            meter.count_non_finite()
            if source.means is None:
                source.means = Means(None)
            source.means.add(number, meter, version)
            for kind, text in source.alarms.see(number, source.facts["ranks"], meter).items():
                logger.warning("%s", text)
                self._write(source, "warning", {"about": kind, "text": text})
            source.means.monitor_s += time.perf_counter() - begin
            if source.means.steps >= self._every:
                self._record(source)

    def _source(self, compressor: Any) -> _Source:
        if compressor not in self._sources:
            self._sources[compressor] = _Source(self._known, Alarms(*self._limits))
            self._known += 1
        return self._sources[compressor]

    def _record(self, source: _Source) -> None:
        """Write the means of the steps since the last record."""
        means, begin = source.means, time.perf_counter()
        if means is None or not means.steps:
            return
        source.means = Means(means.ended)
        self._write(source, "step", means.record())
        # The next record includes the time of this one.
        source.means.monitor_s += time.perf_counter() - begin

    def _write(self, source: _Source, kind: str, record: Mapping[str, Any]) -> None:
        full = {"kind": kind, "compressor": source.number, "time": time.time(), **record}
        if self._sinks is None:
            self._sinks = self._opened(source.facts.get("rank", 0))
        self._to_sinks(lambda sink: sink.write(full))

    def _to_sinks(self, call: Callable[[Sink], None]) -> None:
        """Call ``call`` for each sink; drop a sink that fails, and continue."""
        sinks = self._sinks or []
        for sink in sinks.copy():
            # A tracker raises errors of its own, which must not end a training.
            expected = Exception if sink in self._own else OSError
            try:
                call(sink)
            except expected as error:
                sinks.remove(sink)
                logger.warning("monitor: writing stopped: %s", error)
                with contextlib.suppress(expected):
                    sink.close()

    def _opened(self, rank: int) -> list[Sink]:
        sinks: list[Sink] = [PythonLog(logger)] if self._log else []
        if self._writer is not None:
            sinks.append(TensorBoard(self._writer, self._name))
        sinks += self._own
        if self._folder is not None:
            try:
                sinks.append(JsonLines(self._folder, self._name, rank))
            except OSError as error:
                logger.warning("monitor: %s: cannot be written: %s", self._folder, error)
        mine = weakref.ref(self)
        atexit.register(lambda: None if (monitor := mine()) is None else monitor.close())
        return sinks

    # A pickled copy has the settings only, and writes to files of its own.

    def __getstate__(self) -> dict[str, Any]:
        without = dict.fromkeys(("_sinks", "_sources", "_writer", "_lock"))
        return self.__dict__ | without | {"_own": []}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self._sources, self._lock = weakref.WeakKeyDictionary(), threading.RLock()


@dataclass
class _Source:
    """Compressor that a monitor serves, with its number within the monitor."""

    number: int
    alarms: Alarms
    facts: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)  # of tables that were written, by part
    # The ranks that stock exchanges were measured with, and their seconds by name.
    stock: tuple[Any, dict[str, float] | None] = None, None
    means: Means | None = None


def _checked_folder(folder: Any) -> Path | None:
    """Return a path, or None for None; raise ValueError otherwise."""
    if folder is None:
        return None
    path = folder.__fspath__() if isinstance(folder, os.PathLike) else folder
    if not isinstance(path, str) or not path or "\0" in path:
        raise ValueError(f"folder={folder!r}: must be a path that is not empty, or None")
    return Path(path)


def _checked_sinks(sinks: Any) -> list[Any]:
    """Return a list of objects that can be written to; raise ValueError otherwise."""
    if isinstance(sinks, str) or not isinstance(sinks, Collection):
        raise ValueError(f"sinks={sinks!r}: must be a collection of sinks")
    for sink in sinks:
        lacks = [m for m in ("write", "flush", "close") if not callable(getattr(sink, m, None))]
        if lacks or isinstance(sink, type):
            called = ", ".join(f"{m}()" for m in lacks) or "an instance, not a class"
            raise ValueError(f"sinks: {sink!r}: must have {called}")
    return list(sinks)
