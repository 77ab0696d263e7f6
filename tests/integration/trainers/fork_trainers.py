"""Forked processes that share the trainers' libraries: fork_trainers.py FOLDER RANKS CHECKS...

A Lightning trainer without a launcher; the checks on every rank; the trainings of fresh_runs.py, as
a whole and resumed in new processes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "parallel" / "ddp"))
sys.path.append(str(Path(__file__).resolve().parents[3] / "examples"))

import accelerate
import fork_ranks
import lightning
import transformers

import hvd_adaptive.integrations.lightning

# Imported once, before the fork.
LIBRARIES = accelerate, transformers.Trainer, hvd_adaptive.integrations.lightning


def alone() -> int:
    """A trainer in a process that nothing has launched; its exit status."""
    child = os.fork()
    if not child:
        lightning.Trainer(accelerator="cpu", logger=False)
        os.write(1, b"made without a launcher\n")
        os._exit(0)
    return os.waitpid(child, 0)[1]


if __name__ == "__main__":
    folder, *checks = sys.argv[1:]
    failed = alone() or fork_ranks.main(checks)
    if not failed:
        import fresh_runs

        failed = fresh_runs.main(folder, "whole") or fresh_runs.main(folder, "rest")
    sys.exit(bool(failed))
