"""Memory that a compressor takes beyond the gradients, and whether it grows.

    mpirun -np 2 python benchmarks/memory.py [--scheme "ALQ(bits=3)"] [--steps 10000]
                                             [--width 64] [--parameters 12000000]

1. Growth: ``--steps`` steps of a small network; resident memory, threads, open files and Python
   objects after a tenth of them and at the end. (Allocators settle in the first tenth.)
2. Peak: resident memory in steps of a network of ``--parameters`` coordinates at its highest,
   above what parameters and gradients take; beside it ``report()``'s ``peak_bytes``, and the same
   of stock Horovod. Set MALLOC_MMAP_THRESHOLD_=65536, so that what is freed is given back.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from tqdm import tqdm

from hvd_adaptive.tools.methods import parse

STEPS = 4


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def highest(action: Callable[[], object]) -> int:
    """How far resident memory rises above its present size while ``action`` runs."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = resident()
    action()
    status = Path("/proc/self/status").read_text().split("VmHWM:")[1]
    return int(status.split()[0]) * 1024 - before


def counts() -> dict[str, int]:
    """What must not grow."""
    gc.collect()
    return {
        "bytes": resident(),
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
        "objects": len(gc.get_objects()),
    }


def optimizer_of(model: torch.nn.Module, compression: Any) -> torch.optim.Optimizer:
    """Stock Horovod's, with SGD."""
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        named_parameters=model.named_parameters(),
        compression=compression,
    )


def network(width: int, layers: int) -> torch.nn.Module:
    """Linear layers of one width."""
    torch.manual_seed(0)
    made = [torch.nn.Linear(width, width) for _ in range(layers)]
    return torch.nn.Sequential(*(part for linear in made for part in (linear, torch.nn.Tanh())))


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, width: int) -> None:
    """Forward, backward, exchange, update."""
    optimizer.zero_grad()
    model(torch.randn(4, width)).square().mean().backward()
    optimizer.step()


def growth(compression: Any, steps: int, width: int, progress: bool = False) -> dict[str, int]:
    """How much more there is of everything at the end than after a tenth of the steps."""
    model = network(width, 3)
    optimizer = optimizer_of(model, compression)
    early: dict[str, int] = {}
    for number in tqdm(range(steps), disable=hvd.rank() > 0 or not progress, unit="step"):
        if number == steps // 10:
            early = counts()
        step(model, optimizer, width)
    return {name: count - early[name] for name, count in counts().items()}


def peak(make: Callable[[], Any], parameters: int) -> tuple[int, int]:
    """Memory beyond parameters and gradients, at the highest of the first steps, in bytes: as the
    system sees it, and as ``report()`` tells."""
    width = 1000
    model = network(width, max(1, round(parameters / (width * width + width))))
    model(torch.randn(4, width)).square().mean().backward()

    def train() -> None:
        optimizer = optimizer_of(model, make())
        for _ in range(STEPS):
            step(model, optimizer, width)
        reports.append(getattr(optimizer._compression, "report", dict)())

    reports: list[dict[str, float]] = []
    measured = highest(train)
    return measured, int(reports[0].get("peak_bytes", 0))


def main() -> None:
    """Measure and print, on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scheme", default="ALQ(bits=3)")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--parameters", type=int, default=12_000_000)
    args = parser.parse_args()
    (method,) = parse([args.scheme])
    torch.set_num_threads(1)
    # Horovod's own buffer, where several small tensors travel as one, is not what is measured.
    os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", "0")
    hvd.init()

    lines = []
    if args.parameters:
        peak(method.scheme, 1_000_000)  # compiles
        stock, _ = peak(lambda: hvd.Compression.none, args.parameters)
        measured, told = peak(method.scheme, args.parameters)
        lines += [
            f"peak of {args.parameters:,} coordinates, {hvd.size()} ranks, MB beyond gradients:",
            f"  stock float32 {stock / 1e6:.1f}; {args.scheme} {measured / 1e6:.1f}, "
            f"of which report() tells {told / 1e6:.1f}",
        ]
    if args.steps:
        grown = growth(method.scheme(), args.steps, args.width, progress=True)
        lines += [
            f"from step {args.steps // 10:,} to step {args.steps:,} {args.scheme} grew by "
            + ", ".join(f"{count:+,} {name}" for name, count in grown.items())
        ]
    if hvd.rank() == 0:
        print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
