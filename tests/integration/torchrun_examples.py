"""Every rank: run the examples that torchrun starts, one after the other in one process.

test_examples_all.py runs: python torchrun_examples.py PORT... (of a store for each of them)
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import ddp_hook
import fsdp2
import local_sgd
import ppo

from hvd_adaptive import instances

RANK, PORTS = os.environ["HOROVOD_RANK"], sys.argv[1:]


def printed(example, *words: str) -> str:
    """What it prints with these words, as a process that torchrun has started."""
    os.environ |= {
        "RANK": RANK,
        "LOCAL_RANK": RANK,
        "WORLD_SIZE": os.environ["HOROVOD_SIZE"],
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": PORTS.pop(),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    sys.argv = [example.__file__, *words]
    instances.start_over()
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        assert not example.main()
    return told.getvalue()


def check_ddp_hook(told: str) -> None:
    """It learns, processes stay equal, about log2(7) bits travel."""
    assert "parameters equal on 2 processes" in told, told
    assert float(told.partition("accuracy ")[2].partition("%")[0]) > 60, told
    sent, bits = told.partition(" ms a step")[2].split("\n")[1].split(" bytes sent")
    assert 2.8 < float(bits.rsplit(",", 1)[1].split()[0]) < 3.1, told
    assert 10.5 < 4 * 431_080 / int(sent.replace(",", "")) < 32 / math.log2(7), told


def check_local_sgd(told: str) -> None:
    """Four rounds, of which the last one is shorter; it learns."""
    assert "after 4 rounds" in told, told
    assert float(told.partition("accuracy ")[2].partition("%")[0]) > 60, told
    # 4 of 32 bits, every 20th step.
    sent = int(told.rpartition(" rounds, ")[2].split()[0].replace(",", ""))
    assert 7.5 < 4 * 431_080 / 20 / sent < 8, told


def check_ppo(told: str) -> None:
    """The carts learn to stay at 0, with 3 of 32 bits."""
    rewards = [float(part.split(",")[0]) for part in told.split("reward ")[1:]]
    assert rewards[0] < -1 and rewards[-1] > -0.3, told


def check_fsdp2(told: str) -> None:
    """The transformer learns with 4 bits."""
    losses = [float(part.split()[0]) for part in told.split("loss ")[1:]]
    assert losses[0] > 5 and losses[-1] < 3, told
    sent = int(told.split(" bytes sent")[0].split()[-1].replace(",", ""))
    assert 7.5 < 4 * 470_000 / 2 / sent < 8.2, told  # float32 would send half of the gradients


DDP_HOOK = "--no-cuda", "--steps", "40", "--bucket-cap-mb", "0.5"
RUNS = (
    (check_ddp_hook, ddp_hook, DDP_HOOK),
    (check_local_sgd, local_sgd, ("--steps", "70", "--every", "20")),
    (check_ppo, ppo, ()),
    (check_fsdp2, fsdp2, ()),
)

if __name__ == "__main__":
    # Checked when all have run: the other process would wait for this one.
    output = [printed(example, *words) for _, example, words in RUNS]
    if RANK == "0":
        for (check, _, _), told in zip(RUNS, output, strict=True):
            check(told)
    sys.stderr.write("all examples ran\n")
