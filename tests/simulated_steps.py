"""Steps of simulated ranks (hvd_adaptive.simulate)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from hvd_adaptive.simulate import Ranks


def take_step(
    ranks: Ranks,
    step: int,
    parameters: Sequence[torch.nn.Parameter],
    gradients: Iterable[Iterable[torch.Tensor | None]],
) -> list[torch.Tensor]:
    """Return the averages of gradients, which are given by rank and parameter. Tables are fitted
    first if they are due."""
    for rank, of_rank in enumerate(gradients):
        for parameter, gradient in zip(parameters, of_rank, strict=True):
            parameter.grad = gradient
        ranks.take(rank)
    if ranks.due(step):
        ranks.refit(step)
    ranks.average(step)
    return [parameter.grad.clone() for parameter in parameters]
