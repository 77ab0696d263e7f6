"""Write files that other processes read meanwhile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> Any:
    """Return what a file holds, {} if there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write_json(path: Path, value: Any) -> None:
    """Replace the file by a whole one: a process that ends meanwhile leaves the old file."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value), encoding="utf-8")
    part.replace(path)
