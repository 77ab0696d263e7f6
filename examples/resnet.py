"""ResNets of He et al. (2015), with the shapes and names of torchvision's."""

from __future__ import annotations

import torch
from torch import nn


class Basic(nn.Module):
    """Two 3x3 convolutions."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(inputs, width, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, inputs, h, w) to (batch, width, h / stride, w / stride)."""
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.downsample(x))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions; the second has the stride."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.downsample = _shortcut(inputs, 4 * width, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, inputs, h, w) to (batch, 4 width, h / stride, w / stride)."""
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        return torch.relu(self.bn3(self.conv3(y)) + self.downsample(x))


class ResNet(nn.Module):
    """Four stages of blocks; 1,000 classes."""

    def __init__(self, block: type[Basic] | type[Bottleneck], counts: tuple[int, ...]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        inputs = 64
        for stage, count in enumerate(counts, 1):
            blocks = []
            for place in range(count):
                stride = 2 if stage > 1 and place == 0 else 1
                blocks.append(block(inputs, 32 << stage, stride))
                inputs = block.expansion * (32 << stage)
            setattr(self, f"layer{stage}", nn.Sequential(*blocks))
        self.fc = nn.Linear(inputs, 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Scores of the classes, from (batch, 3, h, w)."""
        x = self.maxpool(torch.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean(dim=(2, 3)))


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


MODELS = {
    "resnet18": lambda: ResNet(Basic, (2, 2, 2, 2)),
    "resnet34": lambda: ResNet(Basic, (3, 4, 6, 3)),
    "resnet50": lambda: ResNet(Bottleneck, (3, 4, 6, 3)),
}
