"""Models whose buckets hold several groups, of which some may be handed over early."""

from __future__ import annotations

import torch
import torch.distributed as dist
from ddp_oracles import FINE, make_net, wrap
from torch import nn
from torch.utils.checkpoint import checkpoint

from hvd_adaptive import QSGD

STEPS, TOLERANCE = 6, 0.05
SMALL = {"bucket_size": 128, "fusion_bytes": 16384}


def wrapped(net: nn.Module, compressor=None, keywords=None, **options):
    """A DDP model with buckets of several groups of several layers; the state, too.

    keywords: More of the compressor's, if none is given.
    """
    compressor = compressor or QSGD(**FINE | SMALL | (keywords or {}))
    return wrap(net, compressor, **{"bucket_cap_mb": 0.05} | options)


def layers(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(40, 40) for _ in range(count)))


def deep_net() -> nn.Sequential:
    """Several buckets, of several groups each, of several layers."""
    torch.manual_seed(0)
    hidden = [layer for _ in range(24) for layer in (nn.Linear(40, 40), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(40, 10))


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.spare = deep_net(), nn.Linear(40, 40)

    def forward(self, x):
        return self.net(x)


class Branches(nn.Module):
    """Two branches, whose gradients arrive in an order that differs between ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.head = layers(12), layers(12), nn.Linear(40, 10)

    def forward(self, x):
        first, second = (self.b, self.a) if dist.get_rank() % 2 else (self.a, self.b)
        y = first(x)
        return self.head(y + second(x))


class Halves(nn.Module):
    """Two networks, whose gradients share buckets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (nn.Sequential(layers(13), nn.Linear(40, 10)) for _ in range(2))

    def forward(self, x):
        return self.a(x), self.b(x)


class Checkpointed(nn.Module):
    """Each layer is run again in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.net, self.reentrant = make_net(), reentrant

    def forward(self, x):
        x = x.requires_grad_()  # or reentrant checkpoints have no backward pass
        for layer in self.net:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class Shared(nn.Module):
    """A layer that two reentrant checkpoints use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.first = nn.Linear(40, 40), nn.Linear(40, 40)
        self.own, self.last = deep_net()[:-1], nn.Linear(40, 10)

    def forward(self, x):
        x = checkpoint(self.shared, self.first(x), use_reentrant=True)
        x = checkpoint(self.shared, self.own(x), use_reentrant=True)
        return self.last(x)


class Gated(nn.Module):
    """A network whose middle counts from some step on only: its gradients are zero before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.last, self.is_open = layers(20), nn.Linear(40, 10), False

    def forward(self, x):
        for layer in self.layers:
            added = layer(x)
            x = x + (added.relu() if self.is_open else added.clamp(max=-1e6) + 1e6)
        return self.last(x)
