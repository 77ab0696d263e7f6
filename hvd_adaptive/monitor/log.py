"""Write a monitor's records, and read them. A record is a dict that JSON can represent; ``kind`` is
its type.
"""

from __future__ import annotations

import json
import logging
import math
import re
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from hvd_adaptive.monitor.meter import SECONDS

logger = logging.getLogger("hvd_adaptive")

Record = Mapping[str, Any]

# Longest time until written lines are flushed, in seconds; a later line flushes them.
FLUSH_SECONDS = 5.0
SUFFIX = ".jsonl"


class Sink(Protocol):
    """Consumer of records; records may follow after ``close``."""

    def write(self, record: Record) -> None: ...

    def flush(self) -> None:
        return

    def close(self) -> None:
        return


def new_tables(parts: Mapping[str, Any], known: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Yield part, version and levels of tables whose versions are not ``known``, and note these."""
    for part, codec in parts.items():
        if known.get(part) != codec.table_version:
            known[part] = codec.table_version
            levels = getattr(codec, "levels", None)
            if levels is not None:
                yield {"part": part, "version": known[part], "levels": levels.tolist()}


class JsonLines:
    """Writer of one line of JSON for each record; NaN and infinity become null.

    Lines are appended to ``path`` if it ends with ".jsonl". Otherwise it is a folder, in which each
    process creates a file of its own, so that restarts and elastic newcomers never share one; its
    name begins with ``name`` and the rank. OSError is raised if it cannot be written.
    """

    def __init__(self, path: Path, name: str, rank: int) -> None:
        self._file: IO[str] | None = None
        self._flushed = time.monotonic()
        if path.suffix != SUFFIX:
            begun = f"{name}-rank{rank}-{time.strftime('%Y%m%dT%H%M%S')}"
            path /= f"{begun}-{uuid.uuid4().hex[:12]}{SUFFIX}"
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def write(self, record: Record) -> None:
        """Append a line; open the file if necessary."""
        if self._file is None:
            self._file = self._path.open("a", encoding="utf-8")
        plain = json.loads(json.dumps(record), parse_constant=lambda name: None)  # no NaN
        self._file.write(json.dumps(plain, separators=(",", ":")) + "\n")
        now = time.monotonic()
        if record["kind"] != "step" or now - self._flushed > FLUSH_SECONDS:
            self._flushed = now
            self._file.flush()

    def flush(self) -> None:
        """Flush the file."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Close the file; a later record opens it again."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


class PythonLog(Sink):
    """Writer of one log line at level INFO for each record."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def write(self, record: Record) -> None:
        """Log the record if its kind has a line."""
        if record["kind"] in _LINES:
            self._logger.info("%s", _LINES[record["kind"]](record))


def _start_line(record: Record) -> str:
    groups, stock = record["groups"], record.get("stock") or {}
    coordinates = sum(group["coordinates"] for group in groups)
    line = (
        f"monitoring {record['scheme']} over {record['ranks']} ranks: {coordinates:,} coordinates"
    )
    times = (f"; one exchange in stock {n} takes {1e3 * s:.1f} ms" for n, s in stock.items())
    return f"{line} in {len(groups)} groups{''.join(times)}"


def _step_line(record: Record) -> str:
    ratio, error = record["ratio"], record["relative_error"]
    figures = [
        f"{record['wire_bytes'] / 1e6:.3f} MB sent",
        None if ratio is None else f"payloads {ratio:.1f} times smaller than gradients",
        None if error is None else f"relative error {error:.3g}",
        f"encode {1e3 * record['encode_s']:.1f}, wait {1e3 * record['exchange_s']:.1f}, "
        f"decode {1e3 * record['decode_s']:.1f} ms",
        f"{record['non_finite']} buckets not finite" if record["non_finite"] else None,
    ]
    return f"step {record['step']}: {', '.join(filter(None, figures))}"


# Schemes log their tables themselves, and the monitor logs warnings.
_LINES: dict[str, Callable[[Record], str]] = {"start": _start_line, "step": _step_line}


# Figures that are curves: of groups and steps, and of steps only.
OF_GROUPS = ("payload_bytes", "relative_error", *SECONDS)
OF_STEPS = ("wire_bytes", "ratio", "bits_per_coordinate", "step_s", "peak_bytes", "non_finite")


class TensorBoard:
    """Writer of scalars by the user's object with ``add_scalar(tag, value, step)``."""

    def __init__(self, writer: Any, prefix: str) -> None:
        self._writer, self._prefix = writer, prefix

    def write(self, record: Record) -> None:
        """Write the scalars of a record of a step or a table."""
        prefix, scalars = self._prefix, {}
        if record["compressor"]:
            prefix += f"/{record['compressor']}"
        if record["kind"] == "step":
            scalars = {name: record[name] for name in (*OF_GROUPS, *OF_STEPS, "table_version")}
            for group in record["groups"]:
                scalars |= {f"group {group['group']}/{name}": group[name] for name in OF_GROUPS}
        elif record["kind"] == "table":
            part = f" {record['part']}" if record["part"] else ""
            levels = enumerate(record["levels"])
            scalars = {f"levels{part}/{index:03d}": level for index, level in levels}
        for name, value in scalars.items():
            if value is not None and math.isfinite(value):
                self._writer.add_scalar(f"{prefix}/{name}", value, record["step"])

    def flush(self) -> None:
        """Flush the user's writer if it can be flushed."""
        getattr(self._writer, "flush", lambda: None)()

    def close(self) -> None:
        """Flush; the user closes the writer."""
        self.flush()


class LogError(ValueError):
    """There is no log to read; the message names the path."""


@dataclass
class Log:
    """Records of a compressor on one rank, ordered by time; restarts follow each other.

    ``label`` is the monitor's name and, if it served several compressors, the compressor's number.
    ``starts`` are records of layouts (run/monitored.py), ``steps`` those of meter.py.
    """

    label: str
    rank: int
    starts: list[dict[str, Any]] = field(default_factory=list)
    tables: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[dict[str, Any]] = field(default_factory=list)


KINDS = {"start": "starts", "table": "tables", "step": "steps", "warning": "warnings"}
NUMBER = int | float
FIGURES = (
    *("coordinates", "uncompressed_bytes", "payload_bytes", "wire_bytes", "relative_error"),
    *(*SECONDS, "flight_s", "step_s", "blocked_s", "arrival_s"),
)
MEANS = {f"{name}?": NUMBER for name in FIGURES}
# The forms of what is read of each record: a type, integers of a range, (the form of all items),
# [a form of each item], or {field: form}; a field with "?" may be missing or null.
FORMS: dict[str, dict[str, Any]] = {
    "start": {
        **dict.fromkeys(("scheme", "version", "torch", "host"), str),
        "rank": int,
        "ranks": range(1, 2**31),
        "stock?": {"float32": NUMBER, "float16?": NUMBER},
        "groups": (
            {
                **dict.fromkeys(("group", "coordinates", "quantized"), int),
                **dict.fromkeys(("part", "dtype", "exchange"), str),
                "members": ([str, int, int],),
            },
        ),
    },
    "table": {"step": int, "part": str, "version": int, "levels": (NUMBER,)},
    "step": {
        **dict.fromkeys(("step", "steps", "peak_bytes", "non_finite"), int),
        **MEANS,
        "groups": ({"group": int, **MEANS},),
    },
    "warning": {"text": str},
}


def read_logs(path: Path) -> list[Log]:
    """Return the logs in a folder or a file; for each compressor that of its lowest rank.

    An incomplete line, whose process was killed while writing it, is skipped.

    Raises:
        LogError: There is no log, or no finished step.
    """
    files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    if not files:
        raise LogError(f"{path}: no *{SUFFIX} of a hvd_adaptive.Monitor found")
    found: dict[tuple[str, int, int], Log] = {}
    schemes: Any = defaultdict(lambda: defaultdict(set))  # by log and file
    for file in files:
        name = re.sub(r"-rank\d+-\d{8}T\d{6}-.*", "", file.stem)
        ranks: dict[int, int] = {}
        for record in _records(file):
            number = record["compressor"]
            if record["kind"] == "start":
                ranks[number] = record["rank"]
            rank = ranks.get(number, 0)
            label = f"{name} {number}" if number else name
            key = name, number, rank
            log = found.setdefault(key, Log(label, rank))
            getattr(log, KINDS[record["kind"]]).append(record)
            if record["kind"] == "start":
                schemes[key][file].add(record["scheme"])
    logs: dict[str, Log] = {}
    for key, log in sorted(found.items(), key=lambda item: item[0]):
        for kind in KINDS.values():
            getattr(log, kind).sort(key=lambda record: record["time"])
        if (runs := _runs(schemes[key].values())) > 1:
            text = f"records of {runs} runs with different settings: give each run its own folder"
            log.warnings.append({"text": text})
        if log.starts and log.steps:
            logs.setdefault(log.label, log)
    if not logs:
        raise LogError(f"{path}: has no finished step; its run ended before the first record")
    return list(logs.values())


def _runs(schemes: Iterable[set[str]]) -> int:
    """Return how many runs have written files of these settings; files of one run share some."""
    runs: list[set[str]] = []
    for own in schemes:
        same = [run for run in runs if own & run]
        runs = [run for run in runs if not own & run] + [own.union(*same)]
    return len(runs)


def _records(file: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise LogError(f"{file}: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            form = {"compressor": int, "time": NUMBER, **FORMS[record["kind"]]}
            known = _has(record, form)
        except (ValueError, KeyError, TypeError):
            known = False
        if known:
            yield record
        elif line.strip():
            logger.warning("%s: line %d is no record, skipped", file, number)


def _has(value: Any, form: Any) -> bool:
    """Return whether a value of JSON has a form, as in ``FORMS``."""
    if isinstance(form, dict):
        return isinstance(value, dict) and all(
            _has(value.get(name.rstrip("?")), own)
            or (name.endswith("?") and value.get(name[:-1]) is None)
            for name, own in form.items()
        )
    if isinstance(form, tuple):
        return isinstance(value, list) and all(_has(one, form[0]) for one in value)
    if isinstance(form, list):
        return isinstance(value, list) and len(value) == len(form) and all(map(_has, value, form))
    if isinstance(form, range):
        return isinstance(value, int) and value in form
    return isinstance(value, form)
