"""Figs 6 to 8 of the QCS paper: distributed training with QCS-1, QCS-2 and without either."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from compare_models import fully_connected
from compare_runs import cached_data
from from_examples import LeNet
from kept_run import KeptRun
from torch import nn

from hvd_adaptive import QCS, simulate
from hvd_adaptive.compressor import GradientCompressor

ORDER, BATCH = 512, 16
DECAY = 0.99
CURVE_POINTS = 10
TOLD = 1000
# The paper's: QCS-1 has the best k and Q at gain 32, QCS-2 k = n and Q = 1.
METHODS: dict[str, Callable[..., GradientCompressor] | None] = {
    "baseline": None,
    "QCS-1": functools.partial(QCS, gain=32, bucket_size=ORDER),
    "QCS-2": functools.partial(QCS, measurements=ORDER, quantizer_range=1, bucket_size=ORDER),
}
MODELS: dict[str, Callable[[], nn.Module]] = {"fc": fully_connected, "lenet": LeNet}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.05),
    "Adam": functools.partial(torch.optim.Adam, lr=0.001),
}


@dataclass(frozen=True)
class Training(KeptRun):
    """One run; equal seeds start from equal weights, and see the same examples."""

    model: str
    optimizer: str
    method: str
    workers: int
    seed: int
    steps: int

    def path(self, folder: Path) -> Path:
        """The file of its records."""
        name = f"{self.method}-{self.workers}w-{self.steps}t-{self.seed}.csv"
        return folder / f"{self.model}-{self.optimizer}" / name

    @property
    def settings(self) -> dict[str, Any]:
        return asdict(self) | {"order": ORDER, "batch": BATCH, "decay": DECAY}

    def execute(self, folder: Path) -> None:
        """Train, and write the records."""
        train, validation = cached_data("lenet")
        torch.manual_seed(self.seed)
        make = METHODS[self.method]
        curve = self.workers == 4
        result = simulate.train(
            MODELS[self.model](),
            train,
            optimizer=OPTIMIZERS[self.optimizer],
            schedule=functools.partial(
                schedule, epoch=max(1, len(train[0]) // (BATCH * self.workers))
            ),
            compressor=None if make is None else make(seed=self.seed, keep_zeros=False),
            workers=self.workers,
            steps=self.steps,
            batch_size=BATCH,
            seed=self.seed,
            validation=tuple(part[:TOLD] for part in validation),
            evaluate_every=max(1, self.steps // CURVE_POINTS) if curve else 0,
            progress=False,
        )
        result.settings |= {"run": self.settings}
        result.write(self.path(folder))


def schedule(optimizer: torch.optim.Optimizer, epoch: int) -> Any:
    """The rate falls by DECAY an epoch of ``epoch`` steps."""
    return torch.optim.lr_scheduler.StepLR(optimizer, epoch, DECAY)
