"""Store the results of a simulated run, and write them to CSV files with their settings."""

from __future__ import annotations

import contextlib
import csv
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import Self

Row = dict[str, float | int | str | None]


@dataclass
class Records:
    """Rows of equal columns, and the settings that produced them.

    Attributes:
        settings: Numbers, strings, None, and lists and dicts of these.
        rows: One dict for each row.
    """

    settings: dict[str, Any]
    rows: list[Row]

    def column(self, name: str) -> list[Any]:
        """Return one column without missing values; raise KeyError if there is no such column."""
        return [row[name] for row in self.rows if row[name] is not None]

    def write(self, path: str | Path) -> None:
        """Write a CSV file: settings as lines "# name: JSON", a line of column names, the rows.

        Floats are written so that they are read back exactly. None is an empty cell. The file is
        written completely or not at all.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(path.name + ".part")
        with unfinished.open("w", newline="", encoding="utf-8") as file:
            for name, value in self.settings.items():
                file.write(f"# {name}: {json.dumps(value)}\n")
            writer = csv.DictWriter(file, list(self.rows[0]) if self.rows else [])
            writer.writeheader()
            writer.writerows(self.rows)
        unfinished.replace(path)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a file of ``write``; numbers become int or float."""
        settings: dict[str, Any] = {}
        table: list[str] = []
        with Path(path).open(newline="", encoding="utf-8") as file:
            for line in file:
                if line.startswith("# ") and not table:
                    name, value = line[2:].split(": ", 1)
                    settings[name] = json.loads(value)
                else:
                    table.append(line)
        rows = [{k: _value(cell) for k, cell in row.items()} for row in csv.DictReader(table)]
        return cls(settings, rows)


def _value(cell: str) -> float | int | str | None:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(cell)
    return cell or None


def described(value: Any) -> Any:
    """Return ``value`` as JSON can represent it; other objects become their name or their repr."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {str(k): described(v) for k, v in value.items()}
    if isinstance(value, Sequence):
        return [described(v) for v in value]
    if isinstance(value, functools.partial):
        return {described(value.func): described(value.keywords)}
    return getattr(value, "__qualname__", None) or repr(value)
