"""Read the files that monitors write."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvd_adaptive.monitor.sinks import SUFFIX

logger = logging.getLogger("hvd_adaptive")


class LogError(ValueError):
    """There is no log to read; the message names the path."""


@dataclass
class Log:
    """Records of a compressor on one rank, ordered by time; restarts follow each other.

    Attributes:
        label: The monitor's name and, if it served several compressors, the compressor's number.
        rank: The rank.
        starts: Records of layouts (run/monitored.py).
        tables: Records of level tables (sinks.py).
        steps: Records of steps (meter.py).
        warnings: Records of warnings.
    """

    label: str
    rank: int
    starts: list[dict[str, Any]] = field(default_factory=list)
    tables: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[dict[str, Any]] = field(default_factory=list)


KINDS = {"start": "starts", "table": "tables", "step": "steps", "warning": "warnings"}


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
    for file in files:
        name = re.sub(r"-rank\d+-\d{8}T\d{6}-.*", "", file.stem)
        ranks: dict[int, int] = {}
        for record in _records(file):
            number = record["compressor"]
            if record["kind"] == "start":
                ranks[number] = record["rank"]
            rank = ranks.get(number, 0)
            label = f"{name} {number}" if number else name
            log = found.setdefault((name, number, rank), Log(label, rank))
            getattr(log, KINDS[record["kind"]]).append(record)
    logs: dict[str, Log] = {}
    for _, log in sorted(found.items(), key=lambda item: item[0]):
        for kind in KINDS.values():
            getattr(log, kind).sort(key=lambda record: record["time"])
        if log.starts and log.steps:
            logs.setdefault(log.label, log)
    if not logs:
        raise LogError(f"{path}: has no finished step; its run ended before the first record")
    return list(logs.values())


def _records(file: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise LogError(f"{file}: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            known = record["kind"] in KINDS and isinstance(record["compressor"], int)
        except (ValueError, KeyError, TypeError):
            known = False
        if known:
            yield record
        elif line.strip():
            logger.warning("%s: line %d is no record, skipped", file, number)
