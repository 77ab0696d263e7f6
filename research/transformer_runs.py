"""The runs of transformer.py: the model of examples/fsdp2.py on Python's help texts."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data import topics
from typing import Any

import from_examples  # noqa: F401, which makes examples importable
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fsdp2 import LENGTH, Transformer
from kept_run import KeptRun
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hvd_adaptive import instances, simulate
from hvd_adaptive.ddp import CompressionState, compression_hook
from hvd_adaptive.fsdp import compress_reduce_scatter
from hvd_adaptive.tools.methods import read

RANKS, BATCH, RATE = 2, 8, 1e-3
TESTED = 512  # examples of the test text
METHODS = (
    "fsdp/float32",
    "fsdp/EDEN(bits=4)",
    "fsdp/EDEN(bits=2)",
    "ddp/float32",
    "ddp/ALQ(bits=3)",
)


@functools.lru_cache
def texts() -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return nine tenths and one tenth of the text, int64, and the number of characters."""
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    known = {character: number for number, character in enumerate(sorted(set(text)))}
    numbers = torch.tensor([known[character] for character in text])
    cut = len(numbers) * 9 // 10
    return numbers[:cut], numbers[cut:], len(known)


@dataclass(frozen=True)
class Run(KeptRun):
    """A training run. Equal seeds start from equal weights, and see equal batches."""

    reads = simulate.Records.read

    method: str
    seed: int
    steps: int

    def path(self, folder: Path) -> Path:
        """Return the file of its figures."""
        name = re.sub(r"[^\w.]+", "-", self.method).strip("-")
        return folder / f"{name}-{self.steps}t-{self.seed}.csv"

    @property
    def settings(self) -> dict[str, Any]:
        """Return what its figures must have been made with to be used again."""
        return asdict(self) | {"ranks": RANKS, "batch": BATCH, "rate": RATE, "tested": TESTED}

    def load(self, folder: Path) -> dict[str, float] | None:
        """Return its figures, if they are on disk and were made with the same settings."""
        records = super().load(folder)
        return None if records is None else records.rows[0]

    def execute(self) -> dict[str, Any]:
        """Train on all ranks, a collective.

        Returns:
            test_loss: Nats a character of the test text.
            bits_per_coordinate: Means over steps of the compressor's report; 32 without one.
        """
        instances.start_over()
        train, test, characters = texts()
        torch.manual_seed(self.seed)
        model, compressor, optimizer = self._made(Transformer(characters))
        draw = torch.Generator().manual_seed(1000 * self.seed + dist.get_rank())
        bits = []
        for _ in range(self.steps):
            first = torch.randint(len(train) - LENGTH - 1, (BATCH, 1), generator=draw)
            loss = loss_of(model, train[first + torch.arange(LENGTH + 1)])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            bits.append(compressor.report()["bits_per_coordinate"] if compressor else 32.0)
        with torch.no_grad():
            rows = test[: TESTED * LENGTH + 1].unfold(0, LENGTH + 1, LENGTH).split(128)
            tested = sum(float(loss_of(model, part)) * len(part) for part in rows) / TESTED
        return {"test_loss": tested, "bits_per_coordinate": sum(bits) / len(bits)}

    def _made(self, net: nn.Module) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
        """Return the model, its compressor or None, and the optimizer."""
        door, _, name = self.method.partition("/")
        (method,) = read(name)
        compressor: Any = None
        if method.is_scheme:
            compressor = method.having(seed=self.seed).scheme()
        model = net
        if door == "fsdp":
            for block in net.blocks:
                fully_shard(block)
            fully_shard(net)
            if compressor is not None:
                compress_reduce_scatter(net, compressor)
        else:
            model = DistributedDataParallel(net)
            if compressor is not None:
                state = CompressionState(compressor, net.named_parameters())
                model.register_comm_hook(state, compression_hook)
        return model, compressor, torch.optim.Adam(net.parameters(), RATE)


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Return the mean loss in nats of rows of LENGTH + 1 characters."""
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def work(rank: int, runs: Sequence[Run], folder: Path, store: str) -> None:
    """Make runs on one rank."""
    torch.set_num_threads(1)
    shared = dist.FileStore(f"{store}/ranks", RANKS)
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=RANKS)
    for number, run in enumerate(runs):
        figures = run.execute()
        if rank == 0:
            simulate.Records({"run": run.settings}, [figures]).write(run.path(folder))
            print(f"{number + 1} of {len(runs)}: {run.method}, seed {run.seed}", flush=True)
    dist.destroy_process_group()
