"""Files of the made-up environments that the builder's tests look into."""

from __future__ import annotations

from pathlib import Path


def file(path: Path, text: str) -> Path:
    """Write ``text``, making the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def executable(path: Path, text: str) -> Path:
    """The same, and it can be run."""
    file(path, text).chmod(0o755)
    return path
