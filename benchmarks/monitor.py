"""What a monitor costs: the same training with and without one, step by step in turns.

    mpirun -np 2 python benchmarks/monitor.py [--every 1] [--layers 20] [--width 768] [--steps 60]

Prints the median step without a monitor, the median difference of steps that follow each other,
and what the monitor says of itself (``monitor_s``), as shares of the step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

from hvd_adaptive import ALQ, Monitor

ROUNDS_TO_WARM = 5


def trainer(width: int, layers: int, **keywords: Any) -> Any:
    """A function that takes one step and returns its seconds, on this rank."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3),
        named_parameters=model.named_parameters(),
        compression=ALQ(bits=3, update_steps=[0], **keywords),
    )
    inputs = torch.randn(64, width)

    def step() -> float:
        hvd.barrier()
        begin = time.perf_counter()
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        return time.perf_counter() - begin

    return step


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=1, help="steps between records (1)")
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        monitor = Monitor(folder, every=args.every)
        plain = trainer(args.width, args.layers)
        watched = trainer(args.width, args.layers, monitor=monitor)
        pairs = [(plain(), watched()) for _ in range(ROUNDS_TO_WARM + args.steps)][ROUNDS_TO_WARM:]
        monitor.close()
        files = list(Path(folder).iterdir())
        if hvd.rank():
            return
        lines = [json.loads(line) for line in files[0].read_text().splitlines()]
    step = statistics.median(a for a, _ in pairs)
    more = statistics.median(b - a for a, b in pairs)
    own = statistics.median(r["monitor_s"] for r in lines if r["kind"] == "step")
    groups = next(len(r["groups"]) for r in lines if r["kind"] == "start")
    numbers = args.layers * args.width * (args.width + 1)
    print(f"{numbers:,} coordinates in {groups} groups, {hvd.size()} ranks, every={args.every}")
    print(
        f"a step without: {1e3 * step:.2f} ms; with, more: {1e3 * more:.3f} ms ({more / step:.2%})"
    )
    print(f"the monitor's own count: {1e3 * own:.3f} ms ({own / step:.2%})")


if __name__ == "__main__":
    main()
