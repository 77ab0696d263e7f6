"""Hugging Face Accelerate: a training loop on the handwritten digits of scikit-learn.

torchrun --nproc-per-node 2 examples/recipe_accelerate.py
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hvd_adaptive import ALQ
from hvd_adaptive.integrations.accelerate import compress


def main(steps: int) -> None:
    """Train, and print losses and the size of codes."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    images, digits = load_digits(return_X_y=True)
    data = TensorDataset(torch.from_numpy(images / 16).float(), torch.from_numpy(digits))
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
    net.append(nn.Linear(256, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(data, batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)

    compressor = ALQ(bits=3)
    compress(accelerator, model, compressor)  # the new line

    losses: list[float] = []
    while len(losses) < steps:
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
    accelerator.print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
    accelerator.print(f"{compressor.report()['bits_per_coordinate']:.2f} bits per coordinate")
    accelerator.end_training()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
