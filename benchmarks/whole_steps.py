"""Seconds of whole steps on ranks of this machine, beside those of stock Horovod's float16.

    python benchmarks/whole_steps.py [--cases 500x2000 conv ...] [--methods "ALQ(bits=3)" ...]

500x2000 is a step of 500 tensors of 2,000 coordinates each, whose backward pass does nothing but
call the hooks: it shows what each tensor costs. conv is a real training step of a convolution
network of 2.6 million parameters on random images, a core for each rank. Methods take turns, a few
steps each, in one launch. Medians of the slowest rank's seconds are printed, and of the seconds
that the program's own thread computes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hvd_adaptive.tools.launch import Ranks, run_ranks, send_result
from hvd_adaptive.tools.methods import parse
from hvd_adaptive.tools.output import print_table

CASES = ("500x2000", "2000x200", "5000x100", "conv")
METHODS = ("float32", "float16", "ALQ(bits=3)", "ALQ(bits=3, tuning=Tuning(worker=False))")
BASELINE = "float16"
TURNS, STEPS, SECONDS = 4, 6, 900.0
# Placeholders of all tensors and methods fit into Horovod's response cache.
CACHED = {"HOROVOD_CACHE_CAPACITY": "65536"}

# The seconds of each step: of the clock, and of the thread's processor.
Times = list[tuple[float, float]]


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=CASES, help="tensors x coordinates, or conv")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--ranks", type=int, default=2, help="two or more (2)")
    parser.add_argument("--turns", type=int, default=TURNS, help=f"of each method ({TURNS})")
    parser.add_argument("--plan", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.plan is not None:
        return rank(json.loads(args.plan))
    if args.ranks < 2:
        parser.error("--ranks: must be two or more; Horovod does not call compressors of one rank")
    headings = ("case", "method", "ms a step", "ratio", "thread's ms", "ratio")
    rows = []
    for case in args.cases:
        plan = {"case": case, "methods": list(args.methods), "turns": args.turns}
        rows += rows_of(case, launched(plan, args.ranks))
    caption = f"{args.ranks} ranks; ratios to {BASELINE}"
    print_table(headings, rows, texts=2, caption=caption)
    return 0


def rows_of(case: str, found: dict[str, Times]) -> list[tuple[str, ...]]:
    """Return the table's rows of a case, from each method's seconds on its slowest rank."""
    medians = {
        label: [1e3 * statistics.median(column) for column in zip(*steps, strict=True)]
        for label, steps in found.items()
    }
    base = medians.get(BASELINE, [float("nan")] * 2)
    return [
        (
            case,
            label,
            *(cell for k in range(2) for cell in (f"{own[k]:.1f}", f"{own[k] / base[k]:.2f}")),
        )
        for label, own in medians.items()
    ]


def launched(plan: dict[str, Any], count: int) -> dict[str, Times]:
    """Return each method's seconds, of the slowest rank in each step.

    Raises:
        RanksError: ranks failed.
    """
    words = [str(Path(__file__).resolve()), "--plan", json.dumps(plan)]
    (found,) = run_ranks(words, Ranks(count), SECONDS, **CACHED)
    return found


def rank(plan: dict[str, Any]) -> int:
    """Take steps of every method by turns; the first rank sends the slowest rank's seconds."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    torch.set_num_threads(1)
    methods = {method.label: method for method in parse(plan["methods"])}
    steps = {
        label: stepper(hvd, plan["case"], method.compression(hvd.Compression), label)
        for label, method in methods.items()
    }
    seconds: dict[str, Times] = {label: [] for label in steps}
    for turn in range(1 + plan["turns"]):
        for label, step in steps.items():
            for _ in range(STEPS):
                hvd.barrier()
                begin = time.perf_counter(), time.thread_time()
                step()
                end = time.perf_counter(), time.thread_time()
                if turn:
                    seconds[label].append((end[0] - begin[0], end[1] - begin[1]))
    for label, own in seconds.items():
        everyone = hvd.allgather(torch.tensor([own], dtype=torch.float64), name=f"seconds.{label}")
        seconds[label] = everyone.amax(dim=0).tolist()
    if hvd.rank() == 0:
        send_result(seconds)
    hvd.shutdown()
    return 0


def stepper(hvd: Any, case: str, compression: Any, label: str) -> Callable[[], None]:
    """Return a function that takes a step of a method on its own network."""
    named, backward = conv(hvd.rank()) if case == "conv" else chain(case, hvd.rank())
    import torch

    # Horovod distinguishes the methods' gradients by their names.
    named = [(f"{label}.{name}", parameter) for name, parameter in named]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([parameter for _, parameter in named], lr=1e-6),
        named_parameters=named,
        compression=compression,
    )

    def step() -> None:
        optimizer.zero_grad()
        backward()
        optimizer.step()

    return step


def chain(case: str, seed: int) -> tuple[Sequence[tuple[str, Any]], Callable[[], None]]:
    """Return the parameters of "500x2000", and a backward pass that calls their hooks."""
    import torch

    from hvd_adaptive.tools.bench.backward import FakeNetwork

    count, size = map(int, case.split("x"))
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(size, generator=generator) for _ in range(count)]
    shapes = [(f"layer{slot}.weight", (size,)) for slot in range(count)]
    network = FakeNetwork(shapes, torch.zeros(count * size), [gradients])

    def backward() -> None:
        network.fill(0)
        network().backward()

    return network.named(), backward


def conv(seed: int) -> tuple[Sequence[tuple[str, Any]], Callable[[], None]]:
    """Return a convolution network's parameters, and its backward pass on random images."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128), (128, 256), (256, 512)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 2048), nn.ReLU())
    model.append(nn.Linear(2048, 10))
    torch.manual_seed(seed)
    images, classes = torch.randn(16, 3, 32, 32), torch.randint(10, (16,))

    def backward() -> None:
        nn.functional.cross_entropy(model(images), classes).backward()

    return list(model.named_parameters()), backward


if __name__ == "__main__":
    sys.exit(main())
