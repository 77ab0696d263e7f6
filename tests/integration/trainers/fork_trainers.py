"""A Lightning trainer without a launcher, then the rounds of checks that fork_ranks.py takes, in
forked processes that share the trainers' libraries."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.extend(
    str(Path(__file__).resolve().parents[3] / name)
    for name in ("tests", "tests/integration", "tests/parallel/ddp", "examples")
)

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
    sys.exit(bool(alone() or fork_ranks.main(sys.argv[1:])))
