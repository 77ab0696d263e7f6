"""Make what is missing of an experiment's runs, as the scripts of single papers do."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from compare import execute


def with_results(
    jobs: Mapping[str, Sequence[Any]], folder: Path, processes: int
) -> dict[str, list[tuple[Any, Any]]]:
    """Return each kind's jobs with their results; make those first that ``folder`` lacks.

    Raises SystemExit, with a line for each, if runs fail.
    """
    torch.set_num_threads(1)
    # A killed script must not leave its processes behind: this makes `finally` clauses run.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    missing = [job for kind in jobs.values() for job in kind if job.load(folder) is None]
    failed = execute(missing, folder, processes)
    if failed:
        sys.exit("\n".join(failed))
    return {kind: [(job, job.load(folder)) for job in of] for kind, of in jobs.items()}
