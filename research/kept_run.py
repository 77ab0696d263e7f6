"""What all runs have in common: a file of records, used again while its settings are the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

from hvd_adaptive import simulate


class KeptRun:
    """Base of dataclasses of runs, whose ``execute`` writes ``settings`` as the setting "run"."""

    reads: ClassVar[Callable[[Path], simulate.Records]] = simulate.Result.read

    def path(self, folder: Path) -> Path:
        """Return the file of its records."""
        raise NotImplementedError

    @property
    def settings(self) -> dict[str, Any]:
        """Return what its records must have been made with to be used again."""
        return asdict(self)

    def load(self, folder: Path) -> Any:
        """Return its records, if they are on disk and were made with the same settings."""
        try:
            records = self.reads(self.path(folder))
        except (OSError, KeyError, ValueError):
            return None
        return records if records.settings.get("run") == self.settings else None
