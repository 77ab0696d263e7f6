"""Make gradients of ResNet-18 after some steps on MNIST's images, each rank on images of its own.

The network has the shapes of shapes/resnet18.txt (1,000 classes, of which ten occur). Images are
enlarged to 64 x 64 pixels in three channels. One rank trains it and writes its parameters; then
each computes gradients of minibatches of its own, which any rank can compute again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from laboratory.gradients import VARIANTS
from laboratory.tasks import read_images

MODEL = "resnet18"
STEPS, RATE, MOMENTUM, BATCH, OWN_BATCH, PIXELS, TRAINED_IMAGES = 40, 0.02, 0.9, 32, 16, 64, 4000


class Block(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample: nn.Module = nn.Identity()
        if before != width:
            shortcut = nn.Conv2d(before, width, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.downsample(x))


class ResNet18(nn.Module):
    """ResNet-18 (He et al. 2016), with torchvision's names: 11,689,512 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = nn.Sequential(Block(64, 64, 1), Block(64, 64, 1))
        self.layer2 = nn.Sequential(Block(64, 128, 2), Block(128, 128, 1))
        self.layer3 = nn.Sequential(Block(128, 256, 2), Block(256, 256, 1))
        self.layer4 = nn.Sequential(Block(256, 512, 2), Block(512, 512, 1))
        self.fc = nn.Linear(512, 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return scores of the classes."""
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(images))), 3, 2, 1)
        for layer in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = layer(x)
        return self.fc(x.mean((2, 3)))


class Trained:
    """Hold the trained network, and draw minibatches.

    Args:
        file: Where its parameters are, or are written to.
        is_first: Whether this rank trains it.
        barrier: Waits for all ranks.
    """

    def __init__(self, file: Path, is_first: bool, barrier: Callable[[], object]) -> None:
        torch.manual_seed(0)
        self.network = ResNet18()
        images, self.digits = read_images()
        images = F.interpolate(images.view(-1, 1, 28, 28)[:TRAINED_IMAGES], size=PIXELS)
        self.images = images.expand(-1, 3, -1, -1)
        if is_first:
            self._train()
            torch.save(self.network.state_dict(), file)
        barrier()
        self.network.load_state_dict(torch.load(file, weights_only=True))

    def gradients(self, rank: int) -> list[list[torch.Tensor]]:
        """Return [variant][slot], as gradients.gradients."""
        return [self._gradient(rank, variant) for variant in range(VARIANTS)]

    def exact_mean(self, ranks: int, variant: int) -> list[torch.Tensor]:
        """Return the mean of all ranks' gradients, summed in float64, slot by slot."""
        total = [torch.zeros(p.shape, dtype=torch.float64) for p in self.network.parameters()]
        for rank in range(ranks):
            for slot, gradient in zip(total, self._gradient(rank, variant), strict=True):
                slot += gradient
        return [slot / ranks for slot in total]

    def _train(self) -> None:
        optimizer = torch.optim.SGD(self.network.parameters(), lr=RATE, momentum=MOMENTUM)
        for step in range(STEPS):
            optimizer.zero_grad()
            self._loss(step, BATCH).backward()
            optimizer.step()

    def _gradient(self, rank: int, variant: int) -> list[torch.Tensor]:
        self.network.zero_grad()
        self._loss(STEPS + rank * VARIANTS + variant, OWN_BATCH).backward()
        return [p.grad.clone() for p in self.network.parameters()]

    def _loss(self, seed: int, batch: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(seed)
        own = torch.randperm(len(self.images), generator=draw)[:batch]
        return F.cross_entropy(self.network(self.images[own]), self.digits[own])
