"""Seconds until the first step has ended, with an empty and with a filled cache of kernels.

    python benchmarks/first_step.py [--ranks 1 2 4] [--methods "ALQ(bits=3)" ...] [--launches 3]

Each launch measures, on every rank, the seconds from the construction of the compressor to the end
of the first ``optimizer.step()``, after a stock optimizer has taken some steps, and those of the
second to twelfth step. Launches come in pairs: a cold one has an empty folder for Numba's cache,
and the warm one after it has the folder that the cold one filled. Prints medians over launches of
the slowest rank's seconds. Horovod does not call compressors of one rank, so that this row is of a
step that compresses nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hvd_adaptive.tools.launch import Ranks, run_ranks, send_result
from hvd_adaptive.tools.methods import parse
from hvd_adaptive.tools.output import print_table

METHODS = ("ALQ(bits=3)", "QSGD(bits=4)", "ECDQ(bits=2)")
STEPS, SECONDS = 12, 300.0


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="(1 2 4)")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--launches", type=int, default=3, help="cold and warm ones each (3)")
    parser.add_argument("--rank", metavar="METHOD", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.rank is not None:
        return rank(args.rank)
    if min(args.ranks) < 1:
        parser.error(f"--ranks: must be one or more, not {min(args.ranks)}")
    rows = []
    for method in args.methods:
        for count in args.ranks:
            cold, warm = pairs(method, count, args.launches)
            rows.append((method, str(count), *cells(cold, warm)))
    headings = ["method", "ranks", "cold\nfirst step", "warm\nfirst step"]
    headings += ["slowest\nof the next", "median\nof the next"]
    caption = f"seconds of the slowest rank, medians of {args.launches} launches"
    print_table(headings, rows, caption=caption)
    return 0


def cells(cold: list[list[float]], warm: list[list[float]]) -> tuple[str, ...]:
    """Return a row's cells from the seconds of each launch's steps."""
    later = [max(steps[1:]) for steps in warm]
    usual = [statistics.median(steps[1:]) for steps in warm]
    firsts = ([steps[0] for steps in launches] for launches in (cold, warm))
    return tuple(f"{statistics.median(own):.3g}" for own in (*firsts, later, usual))


def pairs(method: str, count: int, launches: int) -> tuple[list[list[float]], list[list[float]]]:
    """Return the seconds of each step, of cold and of warm launches."""
    cold, warm = [], []
    for _ in range(launches):
        with tempfile.TemporaryDirectory() as folder:
            cold.append(launched(method, count, folder))
            warm.append(launched(method, count, folder))
    return cold, warm


def launched(method: str, count: int, folder: str) -> list[float]:
    """Return the slowest rank's seconds of each step of one launch.

    Raises:
        RanksError: ranks failed.
    """
    words = [str(Path(__file__).resolve()), "--rank", method]
    found = run_ranks(words, Ranks(count), SECONDS, NUMBA_CACHE_DIR=folder)
    return [max(steps) for steps in zip(*found, strict=True)]


def rank(text: str) -> int:
    """Take some steps on one rank, and send their seconds."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    torch.set_num_threads(1)
    (method,) = parse([text])
    trained(hvd, torch, lambda: hvd.Compression.none)
    seconds = trained(hvd, torch, lambda: method.compression(hvd.Compression))
    send_result(seconds)
    hvd.shutdown()
    return 0


def trained(hvd: Any, torch: Any, compression: Any) -> list[float]:
    """Return the seconds of each step; the first one begins with the compressor."""
    torch.manual_seed(hvd.rank())
    layers = [torch.nn.Linear(784, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512)]
    model = torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(512, 10))
    inputs, seconds = torch.randn(8, 784), []
    hvd.barrier()
    begin = time.perf_counter()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        named_parameters=model.named_parameters(),
        compression=compression(),
    )
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
        begin = time.perf_counter()
    return seconds


if __name__ == "__main__":
    sys.exit(main())
