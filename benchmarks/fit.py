"""Seconds that an update of the level table takes on the first rank, on one thread.

    python benchmarks/fit.py [--rounds R]

The pooled statistics of 4 ranks are made from heavy-tailed buckets of 8,192 coordinates: pooling,
all starts and the solver are timed, as they run in an update step. 3 bits from 4 x 20 samples and
8 bits from 4 x 350 are the ALQ paper's CIFAR-10 and ImageNet settings (App. K, Table 7: minutes).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from tqdm import tqdm

from hvd_adaptive import ALQ
from hvd_adaptive.tools.output import print_table

RANKS, BUCKET = 4, 8192
CASES = [(3, 20), (4, 20), (8, 20), (3, 350), (8, 350)]


def collected(scheme: ALQ, samples: int, seed: int) -> list[np.ndarray]:
    """Statistics of every rank: normals whose scale varies from bucket to bucket and inside it."""
    generator = torch.Generator().manual_seed(seed)
    vectors = []
    for _ in range(RANKS):
        scales = torch.exp(torch.randn(samples, 1, generator=generator))
        inside = torch.exp(0.5 * torch.randn(samples, BUCKET, generator=generator))
        values = torch.randn(samples, BUCKET, generator=generator) * scales * inside
        vectors.append(scheme.parts.default.collect(list(values)))
    return vectors


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    cases = [
        (bits, samples, kind, solver)
        for bits, samples in CASES
        for kind in ("histogram", "normal")
        for solver in ("coordinate_descent", "gradient_descent")
    ]
    for bits, samples, kind, solver in tqdm(cases):
        scheme = ALQ(bits=bits, samples=samples, statistics=kind, solver=solver)
        times = []
        for seed in range(args.rounds + 1):
            vectors = collected(scheme, samples, seed)
            begin = time.perf_counter()
            scheme.parts.default.refit(vectors)
            times.append(time.perf_counter() - begin)
        milliseconds = 1e3 * statistics.median(times[1:])
        rows.append((str(bits), str(samples), kind, solver, f"{milliseconds:.1f}"))
    headings = ("bits", "samples a rank", "statistics", "solver", "ms")
    title = f"one update, {RANKS} ranks, bucket {BUCKET}, median of {args.rounds}"
    print_table(headings, rows, texts=0, title=title)


if __name__ == "__main__":
    main()
