"""Train, and let one rank kill or stop itself on the way (run by tests/parallel/accidents.py).

Each rank logs its process, the hash of its parameters after every step, and how it ended.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
from training import batches, distributed, hash_of, loss_of, make_model

from hvd_adaptive import ALQ, ECDQ, BinGrad
from hvd_adaptive.transport.collectives import AllGather, AllToAll
from hvd_adaptive.transport.world import LevelSync

SCHEMES: dict[str, Callable[[], Any]] = {
    "alq": lambda: ALQ(
        bits=2,
        bucket_size=512,
        fusion_bytes=60_000,
        exchange="scatter_reduce",
        update_steps=lambda step: step % 3 == 0,
    ),
    "ecdq": lambda: ECDQ(bits=2, bucket_size=512, fusion_bytes=60_000),
    "bingrad": lambda: BinGrad(bucket_size=512, error_feedback=1.0, exchange="scatter_reduce"),
}
# What happens at which call of which function: before it, or once it has returned.
PHASES: dict[str, tuple[type, str, bool]] = {
    "exchange": (AllToAll, "submit", True),
    "waiting": (AllToAll, "receive", False),
    "second stage": (AllGather, "submit", False),
    "level fit": (LevelSync, "__call__", False),
}


def lie_in_wait(phase: str, count: int, act: Callable[[], None]) -> None:
    """Call ``act`` at the count-th call of the phase's function."""
    kind, name, after = PHASES[phase]
    original, calls = getattr(kind, name), iter(range(count + 1))

    def wrapped(*arguments: Any) -> Any:
        last = next(calls, None) == count
        if last and not after:
            act()
        result = original(*arguments)
        if last and after:
            act()
        return result

    setattr(kind, name, wrapped)


def main() -> None:
    """Plan: folder, scheme, steps, rank, blows: signal, phase, count or seconds of each."""
    plan = json.loads(sys.argv[1])
    faulthandler.register(signal.SIGUSR1)  # accidents.py asks those that hang where they do
    hvd.init()
    model = make_model()

    def log(**line: Any) -> None:
        """Written at once."""
        with open(f"{plan['folder']}/rank{hvd.rank()}.log", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def strike(number: int) -> None:
        """The end of this rank, or its pause."""
        log(struck=time.time())
        os.kill(os.getpid(), number)

    log(pid=os.getpid())
    in_backward: dict[int, Callable[[], None]] = {}
    for blow in plan.get("blows", ()) if plan.get("rank") == hvd.rank() else ():
        act = functools.partial(strike, signal.Signals[blow["signal"]])
        if blow["phase"] == "any":
            timer = threading.Timer(blow["seconds"], act)
            timer.daemon = True
            timer.start()
        elif blow["phase"] == "backward":
            in_backward[blow["count"]] = act
        else:
            lie_in_wait(blow["phase"], blow["count"], act)
    optimizer = distributed(model, SCHEMES[plan["scheme"]]())
    batch = batches(hvd.rank())
    try:
        for step in range(plan["steps"]):
            x, y = batch()
            optimizer.zero_grad()
            hidden = model[:2](x)
            if step in in_backward:
                hidden.register_hook(lambda gradient, act=in_backward[step]: act())
            loss_of(model[2:], (hidden, y)).backward()
            optimizer.step()
            log(step=step, parameters=hash_of(model))
    except BaseException as error:
        log(error=type(error).__name__, told=str(error)[:300])
        raise
    log(done=True)


if __name__ == "__main__":
    main()
