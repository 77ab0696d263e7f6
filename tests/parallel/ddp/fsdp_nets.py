"""A small model that FSDP2 shards, and its exact gradients."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from ddp_oracles import gathered
from torch import nn
from torch.distributed.fsdp import fully_shard

RANK = dist.get_rank()
FINE = {"bits": 8, "norm": "linf", "bucket_size": 128}


class Net(nn.Module):
    """Three blocks whose sizes no number of ranks divides, one of them used twice."""

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(40, 81), nn.Linear(81, 81)
        self.last, self.spare = nn.Linear(81, 11), nn.Linear(81, 11)
        self.scale = nn.Parameter(torch.ones(11))
        self.unused = unused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.second(self.first(x).relu()).relu())
        return self.scale * (self.last(x) if self.unused else self.last(x) + self.spare(x))


def sharded(net: nn.Module, **options) -> nn.Module:
    """A copy: each layer by itself, and the rest."""
    model = copy.deepcopy(net)
    for layer in (model.first, model.second, model.last, model.spare):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def make(unused: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(unused)


def backward(model: nn.Module, step: int) -> torch.Tensor:
    """Add the gradients of a batch of this rank's own."""
    generator = torch.Generator().manual_seed(1000 * step + RANK)
    x = torch.randn(16, 40, generator=generator)
    loss = nn.functional.cross_entropy(model(x).float(), x[:, :11].argmax(1))
    loss.backward()
    return loss.detach()


def stepped(model: nn.Module, compressed, step: int) -> None:
    """A step without an optimizer."""
    model.zero_grad()
    backward(model, step)
    compressed.finish()


def exact(net: nn.Module, *steps: int) -> dict[str, torch.Tensor]:
    """Averages of all ranks' gradients, in float64, without FSDP."""
    plain = copy.deepcopy(net)
    for step in steps:
        backward(plain, step)
    grads = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    return {name: gathered(g).double().mean(0) for name, g in grads.items()}


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients, of all shards."""
    named = model.named_parameters()
    return {n: p.grad.full_tensor().double() for n, p in named if p.grad is not None}


def assert_close(got, wanted, tolerance=0.02):
    assert got.keys() == wanted.keys()
    for name, mean in wanted.items():
        assert (got[name] - mean).norm() <= tolerance * mean.norm(), name
