"""Two DDP models of one process draw different random numbers."""

from __future__ import annotations

import torch
import torch.distributed as dist
from ddp_oracles import assert_same_everywhere
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hvd_adaptive import QSGD
from hvd_adaptive.ddp import CompressionState, compression_hook

N = 20_000


class Product(nn.Module):
    """Its weight's gradient is its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(N))

    def forward(self, own: torch.Tensor) -> torch.Tensor:
        return (self.weight * own).sum()


def values(rank: int) -> torch.Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(rank))


def test_models_draw_different_numbers():
    """Correlation of rounding errors within five standard errors, 1/sqrt(N); equal names, settings
    and gradients."""
    exact = torch.stack([values(rank) for rank in range(dist.get_world_size())]).double().mean(0)
    nets = [Product(), Product()]
    models, states = [], []
    for net in nets:
        state = CompressionState(QSGD(bits=3, norm="linf"), net.named_parameters())
        model = DistributedDataParallel(net)
        model.register_comm_hook(state, compression_hook)
        models.append(model)
        states.append(state)
    rows = []
    for _ in range(2):
        for net, model in zip(nets, models, strict=True):
            net.weight.grad = None
            model(values(dist.get_rank())).backward()
            assert_same_everywhere([net.weight.grad])
            rows.append(net.weight.grad.double() - exact)
    found = torch.corrcoef(torch.stack(rows))
    off = found[~torch.eye(len(rows), dtype=torch.bool)]
    assert off.abs().max() < 5 / N**0.5, found
    assert [state.compressor._training.instance.training for state in states] == [0, 1]
