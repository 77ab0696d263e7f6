"""Exchange gradients by each method in turn, as one rank of `bench exchange`.

``python -m hvd_adaptive.tools.bench.worker PLAN``: a JSON object with tensors, coordinates, steps
and methods, as ``tools.methods`` reads them. The first rank sends the numbers of ranks and hosts,
and each method's figures.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from hvd_adaptive.tools.bench.backward import FakeNetwork, Still, heavy_tailed
from hvd_adaptive.tools.bench.models import shapes
from hvd_adaptive.tools.launch import send_result
from hvd_adaptive.tools.methods import parse

WARM_UP = 3
REPORTED = ("wire_bytes", "relative_error", "encode_s", "exchange_s", "decode_s")


def main() -> None:
    """Run the plan in the command line."""
    import horovod.torch as hvd

    plan = json.loads(sys.argv[1])
    hvd.init()
    each = networks(plan["tensors"], plan["coordinates"], hvd.rank())
    rows = []
    for method in parse(plan["methods"]):
        compression = method.compression(hvd.Compression)
        seconds, means = measured(hvd, next(each), compression, plan["steps"])
        first, median, third = statistics.quantiles(seconds, n=4, method="inclusive")
        row = {"method": method.label, "seconds": median, "quartiles": (first, third)}
        rows.append(row | dict.fromkeys(REPORTED) | means)
    if hvd.rank() == 0:
        send_result({"ranks": hvd.size(), "hosts": hvd.cross_size(), "methods": rows})
    hvd.shutdown()


def networks(tensors: int, coordinates: int, rank: int) -> Iterator[FakeNetwork]:
    """Yield networks with this rank's gradients. Each optimizer needs a new one: the hooks of an
    earlier optimizer stay on its parameters."""
    generator = torch.Generator().manual_seed(rank)
    named = shapes(tensors, coordinates)
    variant = [heavy_tailed(shape, generator) for _, shape in named]
    memory = torch.zeros(coordinates)
    while True:
        yield FakeNetwork(named, memory, [variant])


def measured(
    hvd: Any, network: FakeNetwork, scheme: Any, steps: int
) -> tuple[list[float], dict[str, float]]:
    """Return the slowest rank's seconds of each step, and means of a scheme's reports."""
    named, still = network.named(), Still(network.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(still, named_parameters=named, compression=scheme)
    seconds, reports = [], []
    for step in range(WARM_UP + steps):
        optimizer.zero_grad()
        network.fill(0)
        hvd.barrier()
        begin = time.perf_counter()
        network().backward()
        optimizer.step()
        if step >= WARM_UP:
            seconds.append(time.perf_counter() - begin)
            if hasattr(scheme, "report"):
                reports.append(scheme.report())
    own = torch.tensor(seconds, dtype=torch.float64)
    slowest = hvd.allgather(own[None], name="bench.seconds").amax(dim=0).tolist()
    optimizer.zero_grad()
    if hasattr(scheme, "close"):
        scheme.close()
    means = {n: sum(r[n] for r in reports) / len(reports) for n in REPORTED} if reports else {}
    return slowest, means


if __name__ == "__main__":
    main()
