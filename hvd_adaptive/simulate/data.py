"""Which examples each simulated rank gets at each step."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hvd_adaptive.settings import check_integer

Minibatch = tuple[torch.Tensor, torch.Tensor]
# (rank, step) -> inputs and targets.
Batches = Callable[[int, int], Minibatch]


class Minibatches:
    """Minibatches of ``batch_size`` examples for each of ``workers`` ranks.

    Each epoch draws an order of its own, private to ``seed``; the M pieces of step t follow each
    other in it, and a rest too small for all ranks is left out. So where workers * batch_size are
    equal, a step sees the same examples.
    """

    def __init__(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        batch_size: int,
        workers: int,
        seed: int = 0,
    ) -> None:
        if len(inputs) != len(targets):
            raise ValueError(f"data: has {len(inputs)} inputs but {len(targets)} targets")
        self.inputs, self.targets = inputs, targets
        self.batch_size = check_integer("batch_size", batch_size, 1)
        self.workers, self.seed = workers, check_integer("seed", seed, 0, 2**63 - 1)
        self.steps_per_epoch = len(inputs) // (batch_size * workers)
        if not self.steps_per_epoch:
            raise ValueError(
                f"data: {len(inputs)} examples are not enough for workers={workers} minibatches "
                f"of batch_size={batch_size}"
            )
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64, device="cpu")

    def __repr__(self) -> str:
        return f"Minibatches of {len(self.inputs)} examples"

    def __call__(self, rank: int, step: int) -> Minibatch:
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator(device="cpu").manual_seed((self.seed << 20 | epoch) % 2**63)
            count = len(self.inputs)
            order = torch.randperm(count, generator=generator, device="cpu")
            self._epoch, self._order = epoch, order
        first = (place * self.workers + rank) * self.batch_size
        chosen = self._order[first : first + self.batch_size].to(self.inputs.device)
        return self.inputs[chosen], self.targets[chosen.to(self.targets.device)]


def make_batches(
    data: Minibatch | Batches, batch_size: int | None, workers: int, seed: int
) -> Batches:
    """``data`` itself if it is a callable, else Minibatches of its tensors."""
    if callable(data):
        if batch_size is not None:
            raise ValueError("batch_size: is not taken with a callable, which decides it itself")
        return data
    if batch_size is None:
        raise ValueError("batch_size: must be given with tensors as data")
    return Minibatches(*data, batch_size, workers, seed)
