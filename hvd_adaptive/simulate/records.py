"""What a simulated run tells, and CSV files of it with the settings that made them."""

from __future__ import annotations

import csv
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, float | int | str | None]


@dataclass
class Records:
    """Rows of equal columns, and the settings that made them.

    settings: numbers, strings, lists and dicts of them, None.
    """

    settings: dict[str, Any]
    rows: list[Row]

    def column(self, name: str) -> list[Any]:
        """One column, rows without a value left out; KeyError where there is no such column."""
        return [row[name] for row in self.rows if row[name] is not None]

    def write(self, path: str | Path) -> None:
        """A CSV file: settings as lines "# name: JSON", a line of column names, the rows.

        Floats are written so that they read back exactly; None is an empty cell. The file appears
        whole or not at all.
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
    def read(cls, path: str | Path) -> Records:
        """Inverse of ``write``; numbers come back as int or float."""
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
    if cell == "":
        return None
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            continue
    return cell


def described(value: Any) -> Any:
    """``value`` as JSON can hold it: what it cannot is told by its name or its repr."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {str(k): described(v) for k, v in value.items()}
    if isinstance(value, Sequence):
        return [described(v) for v in value]
    if isinstance(value, functools.partial):
        return {described(value.func): described(value.keywords)}
    return getattr(value, "__qualname__", None) or repr(value)
