"""Small networks for compare.py, beside lenet.py's."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import nn


def fully_connected() -> nn.Module:
    """784-1000-300-100-10 with ReLU: 1,116,410 parameters."""
    sizes = (784, 1000, 300, 100)
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 10))


def resnet8(width: int = 16) -> nn.Module:
    """He et al.'s ResNet for small images with one block a stage: 77,754 parameters, batch norm."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        Block(width, width, stride=1),
        Block(width, 2 * width, stride=2),
        Block(2 * width, 4 * width, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


class Block(nn.Module):
    """Two convolutions of 3x3 beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1:
            self.shortcut.append(nn.Conv2d(inputs, outputs, 1, stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))
