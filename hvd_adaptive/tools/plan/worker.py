"""The program of each of two ranks that measure what collectives cost; see measure.py.

``python -m hvd_adaptive.tools.plan.worker '{"tensors": T}'``. The first rank reports seconds of the
slower rank, the least of several: of small and of large collectives, and of steps without numbers.
With ``{"only": [NAMES]}`` it reports those of the named collectives.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from hvd_adaptive import QSGD
from hvd_adaptive.tools.bench.backward import FakeNetwork, Still
from hvd_adaptive.tools.bench.models import shapes
from hvd_adaptive.tools.launch import send_result

SMALL, LARGE = 1 << 12, 1 << 24
REPEATS, WARM_UP = 5, 2
NUMBERS = 16  # in each tensor of a step that has hardly any


def main() -> None:
    """Measure, and send what the first rank found."""
    import horovod.torch as hvd

    asked = json.loads(sys.argv[1])
    hvd.init()
    found: dict[str, Any] = {}
    calls = _collectives(hvd)
    for kind in asked.get("only", calls):
        call = calls[kind]
        found[kind] = [_least(hvd, f"{kind}.{size}", call, size) for size in (SMALL, LARGE)]
    if "tensors" in asked:
        compressions = {"stock": hvd.Compression.none, "scheme": QSGD(bits=8, norm="linf")}
        for name, compression in compressions.items():
            found[name] = _least(hvd, name, _step(hvd, asked["tensors"], compression), 0)
    if hvd.rank() == 0:
        send_result(found)
    hvd.shutdown()


def _collectives(hvd: Any) -> dict[str, Callable[[str, int], object]]:
    """Return collectives by name; each takes a name and a rank's bytes."""

    def allreduce(dtype: torch.dtype) -> Callable[[str, int], object]:
        # An optimizer's gradients are averaged where they lie.
        return lambda name, size: hvd.allreduce_(
            torch.ones(size // dtype.itemsize, dtype=dtype), op=hvd.Average, name=name
        )

    def alltoall(name: str, size: int) -> object:
        splits = torch.full((hvd.size(),), size // hvd.size(), dtype=torch.int32)
        return hvd.alltoall(torch.zeros(size, dtype=torch.uint8), splits, name=name)

    return {
        "allreduce4": allreduce(torch.float32),
        "allreduce2": allreduce(torch.float16),
        "allgather": lambda name, size: hvd.allgather(
            torch.zeros(size, dtype=torch.uint8), name=name
        ),
        "alltoall": alltoall,
    }


def _step(hvd: Any, tensors: int, compression: Any) -> Callable[[str, int], object]:
    named = shapes(tensors, tensors * NUMBERS)
    variant = [torch.ones(shape) for _, shape in named]
    network = FakeNetwork(named, torch.zeros(tensors * NUMBERS), [variant])
    optimizer = hvd.DistributedOptimizer(
        Still(network.parameters(), lr=1.0),
        named_parameters=network.named(),
        compression=compression,
    )

    def step(name: str, size: int) -> None:
        optimizer.zero_grad()
        network.fill(0)
        network().backward()
        optimizer.step()

    return step


def _least(hvd: Any, name: str, call: Callable[[str, int], object], size: int) -> float:
    """Return the least seconds of several calls, each that of the slower rank."""
    seconds = []
    for _ in range(WARM_UP + REPEATS):
        hvd.barrier()
        begin = time.perf_counter()
        call(f"plan.{name}", size)
        seconds.append(time.perf_counter() - begin)
    own = torch.tensor(seconds[WARM_UP:], dtype=torch.float64)
    every = hvd.allgather(own[None], name=f"plan.{name}.seconds")
    return float(every.amax(dim=0).min())


if __name__ == "__main__":
    main()
