"""Networks, data and gradients of ranks, which every rank can make.

``door``, ``rank``, ``ranks`` and ``gather`` are fixtures of the folders of tests/parallel. A door
makes a training, by stock Horovod or by DDP: its ``model`` is called for a loss, ``average(loss)``
leaves averages in the net's gradients, ``step()`` is the optimizer's, and ``restart()`` takes back
a step that failed, and returns whether it can."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

# Returns all ranks' tensors of one shape, stacked.
Gather = Callable[[torch.Tensor], torch.Tensor]


def make_net(seed: int = 0, width: int = 120) -> nn.Module:
    """Four tensors large enough to be quantised, and three biases."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(40, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, width, bias=False),
        nn.ReLU(),
        nn.Linear(width, 10),
    )


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, 40, generator=generator)
    return x, x[:, :10].argmax(1)


def loss_of(model: Callable[..., torch.Tensor], step: int, rank: int) -> torch.Tensor:
    """Of a rank's batch."""
    x, y = batch(step, rank)
    return nn.functional.cross_entropy(model(x), y)


def gradients_of(
    net: nn.Module, loss: Callable[[Callable[..., torch.Tensor]], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Of ``loss(net)``, before any exchange: the same weights in a model of its own."""
    named = dict(net.named_parameters())
    copies = {name: p.detach().clone().requires_grad_() for name, p in named.items()}
    loss(lambda x: torch.func.functional_call(net, copies, (x,))).backward()
    return {name: p.grad for name, p in copies.items() if p.grad is not None}


def own_gradients(net: nn.Module, step: int, rank: int) -> dict[str, torch.Tensor]:
    return gradients_of(net, lambda model: loss_of(model, step, rank))


def train(training: Any, rank: int, steps: Sequence[int]) -> None:
    for step in steps:
        training.optimizer.zero_grad()
        training.average(loss_of(training.model, step, rank))
        training.step()


def flat_parameters(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def hash_of(*parts: torch.Tensor | nn.Module) -> str:
    """Of the bits of tensors; a module stands for its parameters."""
    digest = hashlib.sha256()
    for part in parts:
        for tensor in part.parameters() if isinstance(part, nn.Module) else [part]:
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def is_same(gather: Gather, what: torch.Tensor | str) -> bool:
    """Whether all ranks have the same bits, or the same text."""
    text = what if isinstance(what, str) else hash_of(what)
    bits = torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)
    return bool((gather(bits) == bits).all())


class Given(nn.Module):
    """Parameters of these shapes; the gradients of what it returns are those that it is given."""

    def __init__(self, shapes: Sequence[Any], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in shapes)

    def forward(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        return sum((w * g).sum() for w, g in zip(self.weights, gradients, strict=True))
