"""What a steady step runs of this package: files, functions, and calls of Python functions.

    mpirun -np 2 python benchmarks/footprint.py [--steps 9] [--list]

A network of 12 gradients trains by Horovod's optimizer, with both exchanges, and by DDP's hook.
Calls of all Python threads are counted (``sys.setprofile``), kernels left out; a generator that
goes on is a call. The first rank prints the step that has the median number of calls.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hvd_adaptive
from hvd_adaptive import ALQ
from hvd_adaptive.ddp import CompressionState, compression_hook
from hvd_adaptive.tools.output import whole

PACKAGE = str(Path(hvd_adaptive.__file__).parent) + "/"
KERNELS = PACKAGE + "kernels/"
Calls = Counter[tuple[str, int, str]]  # by file, line and name of the function
UNCOUNTED = 12  # steps: buckets are rebuilt, kernels loaded, tables fitted
counts: Calls | None = None  # while nobody counts


def count(frame: Any, event: str, _: Any) -> None:
    """Count a call; the profile function of every thread."""
    if event == "call" and counts is not None:
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE) and not code.co_filename.startswith(KERNELS):
            name = code.co_filename.removeprefix(PACKAGE)
            counts[name, code.co_firstlineno, code.co_name] += 1


@contextlib.contextmanager
def counted() -> Iterator[Calls]:
    """Count calls of the package; all ranks have ended the step before the count ends."""
    global counts
    hvd.barrier()
    counts = found = Counter()
    yield found
    hvd.barrier()
    counts = None


def train(model: torch.nn.Module, forward: Any, optimizer: Any, steps: int) -> Calls:
    """Return the calls of each function in the median of the counted steps."""
    inputs, found = torch.randn(8, 256), []
    for step in range(UNCOUNTED + steps):
        with counted() as calls:
            optimizer.zero_grad()
            forward(inputs).square().mean().backward()
            optimizer.step()
        found += [calls] * (step >= UNCOUNTED)
    assert sum(p.grad is not None for p in model.parameters()) == 12
    return sorted(found, key=Counter.total)[steps // 2]


def network() -> torch.nn.Module:
    """Return six linear layers with biases: 12 gradients, 395,000 coordinates."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6)))


def through_horovod(compressor: Any, steps: int) -> Calls:
    """Return the calls of a step of Horovod's optimizer."""
    model = network()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3),
        named_parameters=model.named_parameters(),
        compression=compressor,
    )
    return train(model, model, optimizer, steps)


def through_ddp(compressor: Any, steps: int) -> Calls:
    """Return the calls of a step of DistributedDataParallel."""
    with tempfile.TemporaryDirectory() as own:
        meeting = f"file://{hvd.broadcast_object(own)}/meeting"
        dist.init_process_group("gloo", meeting, rank=hvd.rank(), world_size=hvd.size())
        model = network()
        wrapped = DistributedDataParallel(model)
        state = CompressionState(compressor, model.named_parameters())
        wrapped.register_comm_hook(state, compression_hook)
        found = train(model, wrapped, torch.optim.SGD(model.parameters(), lr=1e-3), steps)
        dist.destroy_process_group()
    return found


# Door: (how it trains, keywords of the compressor).
DOORS: dict[str, tuple[Callable[[Any, int], Calls], dict[str, Any]]] = {
    "Horovod, allgather": (through_horovod, {"exchange": "allgather"}),
    "Horovod, scatter_reduce": (through_horovod, {"exchange": "scatter_reduce"}),
    "DDP, allgather": (through_ddp, {"exchange": "allgather"}),
}


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=whole(1), default=9, help="that are counted (9)")
    parser.add_argument("--list", action="store_true", help="print each function's calls")
    args = parser.parse_args()
    threading.setprofile(count)
    hvd.init()
    torch.set_num_threads(1)
    sys.setprofile(count)
    found = {
        door: run(ALQ(bits=3, **keywords), args.steps) for door, (run, keywords) in DOORS.items()
    }
    sys.setprofile(None)
    if hvd.rank():
        return
    print(f"{'':24s} {'files':>6s} {'functions':>10s} {'calls':>6s} {'a gradient':>11s}")
    for door, calls in found.items():
        files, total = len({file for file, _, _ in calls}), calls.total()
        print(f"{door:24s} {files:6d} {len(calls):10d} {total:6,d} {total / 12:11.1f}")
    for door, calls in found.items() if args.list else ():
        print(f"\n{door}")
        for (file, line, name), number in sorted(calls.items()):
            print(f"{number:6d}  {file}:{line} {name}")


if __name__ == "__main__":
    main()
