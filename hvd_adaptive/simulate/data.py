"""Select the examples of each simulated rank at each step."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hvd_adaptive.base.checks import check_integer

Minibatch = tuple[torch.Tensor, torch.Tensor]
# (rank, step) -> inputs and targets.
Batches = Callable[[int, int], Minibatch]


class Minibatches:
    """Minibatches of ``batch_size`` examples for each of ``workers`` ranks.

    Each epoch draws its own order from ``seed``. The minibatches of a step's ranks are consecutive
    in this order, and a remainder too small for all ranks is dropped. Therefore a step uses the
    same examples in all runs with equal workers * batch_size.

    Args:
        inputs: Examples, along the first dimension.
        targets: Their targets, of the same length.
        batch_size: Examples per rank and step, >= 1.
        workers: Number of ranks.
        seed: Seed of the order, 0 to 2**63 - 1.

    Raises:
        ValueError: Lengths differ, an argument is out of range, or the examples do not suffice for
            one step.
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
        epoch, position = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator(device="cpu").manual_seed((self.seed << 20 | epoch) % 2**63)
            count = len(self.inputs)
            order = torch.randperm(count, generator=generator, device="cpu")
            self._epoch, self._order = epoch, order
        first = (position * self.workers + rank) * self.batch_size
        chosen = self._order[first : first + self.batch_size].to(self.inputs.device)
        return self.inputs[chosen], self.targets[chosen.to(self.targets.device)]


def make_batches(
    data: Minibatch | Batches, batch_size: int | None, workers: int, seed: int
) -> Batches:
    """Return ``data`` if it is callable, without a batch size, else Minibatches of its tensors."""
    if callable(data):
        if batch_size is not None:
            raise ValueError("batch_size: must not be given with a callable, which determines it")
        return data
    if batch_size is None:
        raise ValueError("batch_size: must be given with tensors as data")
    return Minibatches(*data, batch_size, workers, seed)
