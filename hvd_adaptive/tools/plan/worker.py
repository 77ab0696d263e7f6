"""Measure, as one of two ranks, seconds of small and large collectives, and of a tensor's calls."""

from __future__ import annotations

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
TENSORS, NUMBERS = 100, 16  # of a step that has hardly any numbers


def main() -> None:
    """Measure, and send what the first rank found."""
    import horovod.torch as hvd

    hvd.init()
    calls: dict[str, Callable[[str, int], object]] = {
        # An optimizer's gradients are averaged in place.
        "allreduce": lambda name, size: hvd.allreduce_(torch.ones(size // 4), name=name),
        "allgather": lambda name, size: hvd.allgather(torch.zeros(size // 4), name=name),
    }
    found: dict[str, Any] = {
        kind: [_least(hvd, f"{kind}.{size}", call, size) for size in (SMALL, LARGE)]
        for kind, call in calls.items()
    }
    for name, compression in (("stock", hvd.Compression.none), ("scheme", QSGD(bits=8))):
        found[name] = _least(hvd, name, _step(hvd, compression), 0) / TENSORS
    if hvd.rank() == 0:
        send_result(found)
    hvd.shutdown()


def _step(hvd: Any, compression: Any) -> Callable[[str, int], object]:
    named = shapes(TENSORS, TENSORS * NUMBERS)
    variant = [torch.ones(shape) for _, shape in named]
    network = FakeNetwork(named, torch.zeros(TENSORS * NUMBERS), [variant])
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
