"""Compare LocalSGD with an exchange at every step, at equal bytes, on a character transformer.

    python benchmarks/local_sgd.py [--steps 119] [--seeds 5] [--keep FILE]

Two processes of this machine (torch.distributed, Gloo) train the transformer of
laboratory/tasks.py with Adam on Python's help texts. All methods start from the same weights and
see the same batches. Prints the bits per character of the test text at the end, the bits that a
rank sends for each coordinate and step, and each method's mean difference to ``LocalSGD`` over
paired seeds, with its t interval. ``--keep`` continues where it stopped.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from laboratory.curves import half
from laboratory.files import read_json, write_json
from laboratory.tasks import TASKS
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from hvd_adaptive import ALQ, EDEN, LocalSGD
from hvd_adaptive.ddp import CompressionState, compression_hook
from hvd_adaptive.tools.output import print_table, script_parser, whole

RANKS, EVERY, TASK = 2, 7, TASKS["characters"]
LOCAL = "LocalSGD"
METHODS = {
    LOCAL: f"LocalSGD(every={EVERY}, momentum=0.9, lr=0.7), ALQ(bits=4, symmetric=True)",
    "half": "every step, EDEN(bits=0.5)",
    "half, feedback": "every step, EDEN(bits=0.5, error_feedback=0.3)",
    "float32": "every step, float32",
}
SCHEMES: dict[str, Any] = {
    "half": lambda: EDEN(bits=0.5),
    "half, feedback": lambda: EDEN(bits=0.5, error_feedback=0.3),
}


def train(method: str, seed: int, steps: int) -> tuple[float, float]:
    """Return the quality, and the bits that a rank sends for each coordinate and step."""
    rank = dist.get_rank()
    model = TASK.model(seed)
    data = TASK.data(seed, rank, RANKS)
    count = sum(p.numel() for p in model.parameters())
    optimizer = TASK.optimizer(model.parameters(), TASK.rate)
    if method == LOCAL:
        local = LocalSGD(
            optimizer,
            every=EVERY,
            compression=ALQ(bits=4, symmetric=True, seed=seed),
            momentum=0.9,
            lr=0.7,
            named_parameters=model.named_parameters(),
        )
        _run(model, local, data, steps)
        local.finish()
        return data.test(model), 8 * local.report()["wire_bytes_per_step"] / count
    wrapped = DistributedDataParallel(model)
    state = None
    if method in SCHEMES:
        state = CompressionState(SCHEMES[method](), named_parameters=model.named_parameters())
        wrapped.register_comm_hook(state, compression_hook)
    _run(wrapped, optimizer, data, steps)
    sent = 32.0 if state is None else 8 * state.compressor.report()["wire_bytes"] / count
    return data.test(model), sent


def _run(model: torch.nn.Module, optimizer: Any, data: Any, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        data.loss(model, step).backward()
        optimizer.step()


def worker(rank: int, store: str, args: argparse.Namespace, missing: list[tuple[str, int]]) -> None:
    """Train on this rank what is missing; the first one writes each result."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    found = read_json(args.keep)
    for method, seed in tqdm(missing, disable=rank > 0):
        quality, sent = train(method, seed, args.steps)
        found[f"{method}/{seed}/{args.steps}"] = [quality, sent]
        if rank == 0:
            write_json(args.keep, found)
        dist.barrier()
    dist.destroy_process_group()


def show(found: dict[str, list[float]], args: argparse.Namespace) -> None:
    """Print a row for each method."""

    def values(method: str, part: int) -> list[float]:
        return [found[f"{method}/{seed}/{args.steps}"][part] for seed in range(args.seeds)]

    base, rows = values(LOCAL, 0), []
    for method, label in METHODS.items():
        own = values(method, 0)
        differences = [a - b for a, b in zip(own, base, strict=True)]
        cells = "-"
        if method != LOCAL and args.seeds > 1:
            mean, width = statistics.fmean(differences), half(differences)
            cells = f"{mean:+.3f} ({mean - width:+.3f} to {mean + width:+.3f})"
        sent = statistics.fmean(values(method, 1))
        rows.append((label, f"{sent:.2f}", f"{statistics.fmean(own):.3f}", cells))
    headings = ("method", "bits a coordinate and step", TASK.quality, f"minus {LOCAL}")
    print_table(headings, rows, title=f"{args.steps} steps, {args.seeds} seeds, {RANKS} ranks")


def main() -> int:
    """Train what is missing, and print."""
    parser = script_parser(__doc__)
    parser.add_argument("--steps", type=whole(EVERY), default=119)
    parser.add_argument("--seeds", type=whole(1), default=5)
    parser.add_argument("--keep", type=Path, metavar="FILE", help="results, kept for another call")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        args.keep = args.keep or Path(folder, "found.json")
        found = read_json(args.keep)
        missing = [
            (method, seed)
            for seed in range(args.seeds)
            for method in METHODS
            if f"{method}/{seed}/{args.steps}" not in found
        ]
        if missing:
            mp.spawn(worker, (f"{folder}/store", args, missing), nprocs=RANKS)
        show(read_json(args.keep), args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
