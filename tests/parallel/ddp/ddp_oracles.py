"""Models, data, and averages computed without DDP."""

from __future__ import annotations

from collections.abc import Sequence

import nets
import torch
import torch.distributed as dist
from nets import make_net
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hvd_adaptive import QSGD
from hvd_adaptive.ddp import CompressionState, compression_hook
from hvd_adaptive.kernels.random import stream_key

__all__ = ["make_net"]
FINE = {"bits": 8, "norm": "linf", "bucket_size": 128}


def wrap(
    net: nn.Module,
    compressor,
    named=True,
    group=None,
    seen=None,
    hook=compression_hook,
    **options,
):
    """A DDP model with the hook; the state, too.

    seen: a list that gets, of each bucket, (its number, its parameters' names).
    """
    model = DistributedDataParallel(net, process_group=group, **options)
    state = CompressionState(compressor, net.named_parameters() if named else None, group)
    names = {id(parameter): name for name, parameter in net.named_parameters()}

    def noting(state, bucket):
        seen.append((bucket.index(), [names[id(p)] for p in bucket.parameters()]))
        return hook(state, bucket)

    model.register_comm_hook(state, hook if seen is None else noting)
    return model, state


def hooked(net: nn.Module, compressor=None, **options):
    """A DDP model of small buckets; the state, too."""
    return wrap(net, compressor or QSGD(**FINE), **{"bucket_cap_mb": 0.03} | options)


class Training:
    """What the door of tests/nets.py makes: a DDP model of small buckets."""

    def __init__(self, net: nn.Module, compressor, lr: float = 0.1, **options) -> None:
        self.model, self.state = hooked(net, compressor, **options)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=lr)

    def average(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()

    def restart(self) -> bool:
        return False  # DDP cannot go on after an exception from its hook


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's own data."""
    return nets.batch(step, dist.get_rank())


def own_gradients(net: nn.Module, step: int) -> dict[str, torch.Tensor]:
    """This rank's, before any exchange."""
    return nets.own_gradients(net, step, dist.get_rank())


def backward(model: nn.Module, step: int) -> float:
    """Gradients of one batch."""
    model.zero_grad()
    loss = nets.loss_of(model, step, dist.get_rank())
    loss.backward()
    return loss.item()


def assert_averages(
    net: nn.Module, own: dict[str, torch.Tensor | None], tolerance: float = 0.02
) -> None:
    """Gradients are the ranks' means, up to the error of 8 bits; what ``own`` lacks has none."""
    given = [(name, own[name]) for name, _ in net.named_parameters() if own.get(name) is not None]
    flat = torch.cat([gradient.double().reshape(-1) for _, gradient in given])
    means = (sum(gathered(flat)) / dist.get_world_size()).split([g.numel() for _, g in given])
    exact = {name: mean for (name, _), mean in zip(given, means, strict=True)}
    for name, parameter in net.named_parameters():
        if name not in exact:
            assert parameter.grad is None or not parameter.grad.any(), name
            continue
        mean = exact[name].view_as(parameter)
        error = float((parameter.grad - mean).norm() / mean.norm().clamp(min=1e-12))
        assert error < tolerance, (name, error)
    assert_same_everywhere([p.grad for p in net.parameters() if p.grad is not None])


def gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    """All ranks'."""
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor.contiguous())
    return everyone


def assert_trains(model, net, steps: int, tolerance: float = 0.02) -> None:
    """All steps' averages are those of the ranks' own gradients."""
    for step in range(steps):
        own = own_gradients(net, step)
        backward(model, step)
        assert_averages(net, own, tolerance)


def assert_same_everywhere(tensors: Sequence[torch.Tensor]) -> None:
    """Bit for bit."""
    flat = torch.cat([t.detach().reshape(-1).view(torch.uint8) for t in tensors])
    for rank, other in enumerate(gathered(flat)):
        assert torch.equal(other, flat), f"rank {rank} differs"


def codec_average(
    scheme,
    buckets: Sequence[Sequence[str]],
    own: dict[str, torch.Tensor],
    step: int,
) -> dict[str, torch.Tensor]:
    """What an allgather of one payload for each bucket gives: every rank's payload encoded here,
    by ``scheme``, and decoded and added in rank order.

    buckets: names, in the groups' order. Each bucket must make one group; the first one's number is
    the highest.
    """
    ranks, results = dist.get_world_size(), {}
    for place, names in enumerate(buckets):
        large = [n for n in names if own[n].numel() >= scheme.settings.min_numel]
        order = large + [n for n in names if n not in large]
        flat = torch.cat([own[name].reshape(-1) for name in order])
        quantized = sum(own[name].numel() for name in large)
        payloads = []
        for rank, of_rank in enumerate(gathered(flat)):
            key = stream_key(scheme.settings.seed, rank, step, len(buckets) - 1 - place)
            payloads.append(scheme.parts.default.payloads.encode(of_rank, quantized, key).bytes)
        total = torch.zeros_like(flat)
        for payload in payloads:
            total += scheme.decode(payload)
        average = total * (1 / ranks)
        for name, part in zip(order, average.split([own[n].numel() for n in order]), strict=True):
            results[name] = part.view(own[name].shape)
    return results
