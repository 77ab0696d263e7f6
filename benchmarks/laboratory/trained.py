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

from laboratory.gradients import VARIANTS
from laboratory.tasks import read_images

MODEL = "resnet18"
STEPS, RATE, MOMENTUM, BATCH, OWN_BATCH, PIXELS, TRAINED_IMAGES = 40, 0.02, 0.9, 32, 16, 64, 4000


class Trained:
    """Hold the trained network, and draw minibatches.

    Args:
        file: Where its parameters are, or are written to.
        is_first: Whether this rank trains it.
        barrier: Waits for all ranks.
    """

    def __init__(self, file: Path, is_first: bool, barrier: Callable[[], object]) -> None:
        images, self.digits = read_images()
        import resnet  # of examples/, which read_images makes importable

        torch.manual_seed(0)
        self.network = resnet.MODELS[MODEL]()
        images = F.interpolate(images.view(-1, 1, 28, 28)[:TRAINED_IMAGES], size=PIXELS)
        self.images = images.expand(-1, 3, -1, -1)
        if is_first:
            self._train()
            torch.save(self.network.state_dict(), file)
        barrier()
        self.network.load_state_dict(torch.load(file, weights_only=True))

    def _train(self) -> None:
        optimizer = torch.optim.SGD(self.network.parameters(), lr=RATE, momentum=MOMENTUM)
        for step in range(STEPS):
            optimizer.zero_grad()
            self._loss(step, BATCH).backward()
            optimizer.step()

    def gradients(self, rank: int, variant: int) -> list[torch.Tensor]:
        """Return one rank's gradients of all slots."""
        self.network.zero_grad()
        self._loss(STEPS + rank * VARIANTS + variant, OWN_BATCH).backward()
        return [p.grad.clone() for p in self.network.parameters()]

    def _loss(self, seed: int, batch: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(seed)
        own = torch.randperm(len(self.images), generator=draw)[:batch]
        return F.cross_entropy(self.network(self.images[own]), self.digits[own])
