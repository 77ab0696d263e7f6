"""PyTorch Lightning: a classifier of the handwritten digits of scikit-learn.

torchrun --nproc-per-node 2 examples/recipe_lightning.py
"""

from __future__ import annotations

import sys

import lightning
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hvd_adaptive import ALQ
from hvd_adaptive.integrations.lightning import Compress


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch, index):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main(steps: int) -> None:
    """Train, and print the last loss and the size of codes."""
    images, digits = load_digits(return_X_y=True)
    data = TensorDataset(torch.from_numpy(images / 16).float(), torch.from_numpy(digits))
    compressor = ALQ(bits=3)
    quiet = {"logger": False, "enable_checkpointing": False}
    options = {"strategy": "ddp", "devices": 2, "max_steps": steps, **quiet}
    trainer = lightning.Trainer(callbacks=[Compress(compressor)], **options)
    trainer.fit(Digits(), DataLoader(data, batch_size=32, shuffle=True))
    bits = compressor.report()["bits_per_coordinate"]
    trainer.print(f"loss {trainer.callback_metrics['loss']:.3f}, {bits:.2f} bits per coordinate")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
