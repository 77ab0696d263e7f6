"""Forked ranks, which share what was imported and compiled: fork_ranks.py RANKS CHECKS...

Further rounds, of ranks and checks of their own, follow after a "/"; a round may begin with
VARIABLE=VALUE. Exit status 0 where every rank passed all checks.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import groupby, takewhile

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.fsdp

import hvd_adaptive
import hvd_adaptive.ddp
import hvd_adaptive.simulate

# Imported once, before the fork.
LIBRARIES = torch._dynamo, torch.distributed.fsdp, hvd_adaptive.simulate


def main(words: Sequence[str]) -> int:
    """Take one round after the other, until one fails."""
    torch.set_num_threads(1)
    for codec in (hvd_adaptive.ALQ(bits=3), hvd_adaptive.QSGD(bits=4)):  # loads their kernels
        codec.decode(codec.encode(torch.linspace(-1, 1, 20_000)))
    rounds = [list(own) for is_end, own in groupby(words, "/".__eq__) if not is_end]
    return int(any(take(own) for own in rounds))


def take(words: list[str]) -> int:
    """Fork, and end all ranks when one fails: the others would wait for it."""
    variables = list(takewhile(lambda word: "=" in word, words))
    ranks, checks = int(words[len(variables)]), words[len(variables) + 1 :]
    with tempfile.TemporaryDirectory() as folder:
        running = {}
        for rank in range(ranks):
            child = os.fork()
            if not child:
                os.environ.update(variable.split("=", 1) for variable in variables)
                os._exit(work(rank, ranks, os.path.join(folder, "store"), checks))
            running[child] = rank
        while running:
            child, status = os.wait()
            rank = running.pop(child)
            if status:
                print(f"rank {rank} of {ranks} failed", flush=True)
                time.sleep(0.5)  # the others may fail by themselves, and tell why
                for other in running:
                    os.kill(other, 9)
                return 1
    return 0


def work(rank: int, ranks: int, store: str, checks: list[str]) -> int:
    """One rank's checks; its exit status."""
    dist.set_debug_level_from_env()  # which an import has done for the process that was forked
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    settings = (
        "python_files=check_*.py",
        "timeout=60",
        "timeout_method=thread",
    )
    options = [word for setting in settings for word in ("-o", setting)]
    status = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *options, *checks]))
    sys.stdout.flush()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
