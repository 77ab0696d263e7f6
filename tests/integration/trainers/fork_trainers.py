"""Forked ranks that share the trainers' libraries: fork_trainers.py RANKS CHECKS..."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "parallel" / "ddp"))

import accelerate
import fork_ranks
import lightning
import transformers

LIBRARIES = accelerate, lightning, transformers  # imported once, before the fork

if __name__ == "__main__":
    sys.exit(fork_ranks.main())
