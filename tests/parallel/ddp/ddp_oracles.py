"""Models, data, and averages computed without DDP."""

from __future__ import annotations

import copy

import nets
import torch
import torch.distributed as dist
from nets import hash_of, make_net
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hvd_adaptive import QSGD
from hvd_adaptive.ddp import CompressionState, compression_hook

__all__ = ["make_net"]
FINE = {"bits": 8, "norm": "linf", "bucket_size": 128}


def wrap(net, compressor=None, named=True, group=None, hook=compression_hook, **options):
    """A DDP model of small buckets, with the hook; the state, too."""
    model = DistributedDataParallel(net, process_group=group, **{"bucket_cap_mb": 0.03} | options)
    named_parameters = net.named_parameters() if named else None
    state = CompressionState(compressor or QSGD(**FINE), named_parameters, group)
    model.register_comm_hook(state, hook)
    return model, state


class Training:
    """What the door of tests/nets.py makes: a DDP model of small buckets."""

    def __init__(self, net: nn.Module, compressor, lr: float = 0.1, **options) -> None:
        self.model, self.state = wrap(net, compressor, **options)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=lr)

    def average(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()

    def restart(self) -> bool:
        return False  # DDP cannot go on after an exception from its hook


def own_gradients(net: nn.Module, step: int) -> dict[str, torch.Tensor]:
    """This rank's, before any exchange."""
    return nets.own_gradients(net, step, dist.get_rank())


def backward(model: nn.Module, step: int, zero: bool = True) -> float:
    if zero:
        model.zero_grad()
    loss = nets.loss_of(model, step, dist.get_rank())
    loss.backward()
    return loss.item()


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """All ranks', stacked."""
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor.contiguous())
    return torch.stack(everyone)


def mean(tensor: torch.Tensor) -> torch.Tensor:
    """Of all ranks, in float64."""
    return gathered(tensor.detach()).double().mean(0)


def assert_averages(
    net: nn.Module, own: dict[str, torch.Tensor | None], tolerance: float = 0.02, factor=1.0
) -> None:
    """Gradients are the ranks' means, up to the error of 8 bits; what ``own`` lacks has none."""
    given = {name: own[name] for name, _ in net.named_parameters() if own.get(name) is not None}
    flat = mean(torch.cat([gradient.double().reshape(-1) for gradient in given.values()]))
    means = dict(zip(given, flat.split([g.numel() for g in given.values()]), strict=True))
    for name, parameter in net.named_parameters():
        if name not in means:
            assert parameter.grad is None or not parameter.grad.any(), name
            continue
        exact = factor * means[name].view_as(parameter)
        error = float((parameter.grad - exact).norm() / exact.norm().clamp(min=1e-12))
        assert error < tolerance, (name, error)
    assert_same_everywhere(*(p.grad for p in net.parameters() if p.grad is not None))


def assert_trains(model, net, steps: int, tolerance: float = 0.02, factor: float = 1.0) -> None:
    """All steps' averages are those of the ranks' own gradients, times a factor."""
    twin = copy.deepcopy(net)
    for step in range(steps):
        backward(twin, step)
        backward(model, step)
        own = {name: p.grad for name, p in twin.named_parameters()}
        assert_averages(net, own, tolerance, factor)


def assert_same_everywhere(*parts: torch.Tensor | nn.Module) -> None:
    """Bit for bit; a module stands for its parameters."""
    own = torch.tensor(list(hash_of(*parts).encode()), dtype=torch.uint8)
    for rank, other in enumerate(gathered(own)):
        assert torch.equal(other, own), f"rank {rank} differs"
