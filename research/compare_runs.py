"""One simulated run of compare.py, and how it ended."""

from __future__ import annotations

import functools
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compare_methods import METHODS, update_steps
from compare_papers import ALL_METHODS
from compare_tasks import TASKS, Task, cached_data, schedule
from kept_run import KeptRun

from hvd_adaptive import simulate

# Of each method of compare_methods.py, the first seeds also record how loss, accuracy and variance
# develop.
CURVE_SEEDS = 2
CURVE_POINTS = 12
# ... and all seeds of this task, on which claims about the variance in training are decided.
CURVE_TASK = "resnet8"
# Training examples on which the training loss at the end is measured.
TOLD_LOSS = 1000


@dataclass(frozen=True)
class Run(KeptRun):
    """One training run. The same seed gives all methods the same initial weights, and all of the
    same number of workers the same minibatches."""

    task: str
    method: str
    seed: int
    workers: int = 4
    bits: int = 3
    bucket_size: int = 8192
    steps: int = 0
    clip: float | None = None

    def __post_init__(self) -> None:
        """Settings that say nothing are the same for all runs, so that these are made once."""
        method = ALL_METHODS[self.method]
        object.__setattr__(self, "steps", self.steps or TASKS[self.task].steps)
        object.__setattr__(self, "workers", method.workers or self.workers)
        if method.make is None:
            object.__setattr__(self, "bits", 32)
            object.__setattr__(self, "bucket_size", 0)
        elif method.own is not None:
            object.__setattr__(self, "bits", 0)

    def path(self, folder: Path) -> Path:
        """The file of its records."""
        settings = f"{self.workers}w-{self.bits}b-{self.bucket_size}d-{self.steps}t-{self.seed}"
        clip = "" if self.clip is None else f"-{self.clip:g}c"
        return folder / self.task / f"{self.method}{clip}-{settings}.csv"

    @property
    def settings(self) -> dict[str, Any]:
        """What its records must have been made with to be used again."""
        training = {
            name: getattr(self.trained, name)
            for name in ("batch_size", "rate", "momentum", "weight_decay")
        }
        own = ALL_METHODS[self.method].keywords(self.task)
        more: dict[str, Any] = {} if own is None else {"keywords": own}
        more |= {"curves": True} if self.curves else {}
        return asdict(self) | training | {"update_steps": update_steps(self.steps)} | more

    @property
    def curves(self) -> bool:
        """Whether loss, accuracy and variance are recorded in the course of training."""
        standard = Run(self.task, self.method, self.seed)
        told = self.seed < CURVE_SEEDS or (self.task == CURVE_TASK and self == standard)
        return told and self.method in METHODS

    @property
    def trained(self) -> Task:
        """The task, at the rate of this method."""
        task = TASKS[self.task]
        return replace(task, rate=task.rate * ALL_METHODS[self.method].rate)

    def execute(self, folder: Path) -> None:
        """Train, and write the records."""
        task, method = self.trained, ALL_METHODS[self.method]
        train, validation = cached_data(self.task)
        torch.manual_seed(self.seed)
        model = task.model()
        every = max(1, self.steps // CURVE_POINTS)
        result = simulate.train(
            model,
            train,
            optimizer=task.optimizer,
            schedule=functools.partial(schedule, steps=self.steps),
            compressor=method.compressor(
                self.task, self.bits, self.bucket_size, self.seed, self.steps, self.clip
            ),
            workers=self.workers,
            steps=self.steps,
            batch_size=task.batch_size,
            seed=self.seed,
            validation=validation,
            evaluate_every=every if self.curves else 0,
            variance_steps=range(0, self.steps, every) if self.curves else (),
            progress=False,
        )
        loss, _ = simulate.evaluate(model, *(part[:TOLD_LOSS] for part in train))
        result.settings |= {"run": self.settings, "training_loss": loss}
        result.write(self.path(folder))


@dataclass(frozen=True)
class Outcome:
    """How a run ended. Accuracies in %; losses are NaN or huge where training diverged. Bits are a
    mean over the steps (Sparse SGD's vary), the averaged gradient's relative error their median."""

    run: Run
    accuracy: float
    validation_loss: float
    training_loss: float
    bits_per_coordinate: float
    relative_error: float
    # Positive levels at the end, of schemes that have a table.
    levels: tuple[float, ...] = ()
    # Variance of the averaged gradient at several steps of the run's own training, where recorded.
    variances: tuple[float, ...] = ()

    @classmethod
    def of(cls, run: Run, result: simulate.Result) -> Outcome:
        """From the run's records."""
        last, tables = result.rows[-1], result.tables
        return cls(
            run,
            100 * last["validation_accuracy"],
            last["validation_loss"],
            result.settings["training_loss"],
            float(np.mean(result.column("bits_per_coordinate"))),
            float(np.nanmedian(result.column("relative_error"))),
            tuple(v for v in tables[-1]["levels"] if v > 0) if tables else (),
            tuple(row["estimator"] for row in result.rows if row.get("estimator") is not None),
        )

    @property
    def diverged(self) -> bool:
        """Whether the model is no better than one that never learnt: ln 10 is chance."""
        return not (math.isfinite(self.training_loss) and self.training_loss < math.log(10))
