"""Fig. 2 and Tables 2 to 5 of the ORQ paper: training with each method."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from compare_runs import TASKS, cached_data, schedule
from kept_run import KeptRun
from orq_methods import BUCKET, FULL, WORKERS, make

from hvd_adaptive import simulate

TASK = "lenet"
# At the paper's bucket size the first seeds also tell the accuracy in the course of training.
CURVE_SEEDS, CURVE_POINTS = 2, 10


@dataclass(frozen=True)
class Training(KeptRun):
    """One run of a LeNet on MNIST; equal seeds start from equal weights and see equal batches.

    bucket_size, clip: 0 and None for full precision. validation: images, of those there are.
    workers: who share the batch.
    """

    method: str
    bucket_size: int
    clip: float | None
    seed: int
    steps: int
    validation: int = 2000
    workers: int = 1

    def path(self, folder: Path) -> Path:
        """The file of its records."""
        clip = "" if self.clip is None else f"-{self.clip:g}c"
        workers = "" if self.workers == 1 else f"-{self.workers}w"
        name = f"{self.method}-{self.bucket_size}d{clip}{workers}-{self.steps}t-{self.seed}.csv"
        return folder / "training" / name

    @property
    def settings(self) -> dict[str, Any]:
        """What its records must have been made with to be used again."""
        task = TASKS[TASK]
        training = {name: getattr(task, name) for name in ("rate", "momentum", "weight_decay")}
        return asdict(self) | training | {"batch": batch_size()}

    def execute(self, folder: Path) -> None:
        """Train, and write the records."""
        train, validation = cached_data(TASK)
        torch.manual_seed(self.seed)
        standard = self.method == FULL or self.bucket_size == BUCKET
        curve = self.seed < CURVE_SEEDS and self.workers == 1 and standard
        result = simulate.train(
            TASKS[TASK].model(),
            train,
            optimizer=TASKS[TASK].optimizer,
            schedule=functools.partial(schedule, steps=self.steps),
            compressor=make(self.method, self.bucket_size, self.clip, self.seed),
            workers=self.workers,
            steps=self.steps,
            batch_size=batch_size() // self.workers,
            seed=self.seed,
            validation=tuple(part[: self.validation] for part in validation),
            evaluate_every=max(1, self.steps // CURVE_POINTS) if curve else 0,
            progress=False,
        )
        result.settings |= {"run": self.settings}
        result.write(self.path(folder))


def batch_size() -> int:
    """One worker takes what compare.py's four take together."""
    return WORKERS * TASKS[TASK].batch_size
