"""Adapters, which have a gradient only after some steps, inside stock hvd.DistributedOptimizer;
errors of ranks' own gradients, computed in NumPy. Their last bucket is a partial one."""

from __future__ import annotations

import horovod.torch as hvd
import numpy as np
import torch
from conftest import assert_same_everywhere
from exact_errors import relative_error
from rank_optimizers import distributed

from hvd_adaptive import ALQ

BUCKET = 8192


def train(model, optimizer, steps: int, compressor) -> tuple[float, float, list[np.ndarray]]:
    """The last ten steps' mean of reported errors and of exact ones, each weighed by the squared
    norm of its gradient; and the last gradient of each weight, as this rank had it."""
    told, exact, norms, flats = [], [], [], {}
    weights = [(n, p) for n, p in model.named_parameters() if p.requires_grad and p.dim() > 1]
    hooks = [
        p.register_hook(lambda g, name=name: flats.__setitem__(name, g.detach().clone().numpy()))
        for name, p in weights
    ]
    generator = torch.Generator().manual_seed(hvd.rank())
    for step in range(steps):
        x = torch.randn(64, 784, generator=generator) * torch.linspace(0.1, 3, 784)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), x[:, -10:].argmax(1)).backward()
        optimizer.step()
        if step < steps - 10:
            continue
        own = np.concatenate([flats[name].reshape(-1) for name, _ in weights]).astype(np.float64)
        report = compressor.report()
        told.append(report["relative_error"])
        exact.append(relative_error(own, compressor.levels.numpy(), BUCKET, "linf"))
        norms.append(np.sum(own**2))
    for hook in hooks:
        hook.remove()
    assert np.isfinite(told).all()
    means = [float(np.average(each, weights=norms)) for each in (told, exact)]
    return means[0], means[1], [flats[name] for name, _ in weights]


class Adapted(torch.nn.Module):
    """A frozen layer and the B A of an adapter, B zero at first: A has no gradient at step 0."""

    def __init__(self, inputs: int, outputs: int, rank: int = 8) -> None:
        super().__init__()
        self.frozen = torch.nn.Linear(inputs, outputs)
        self.frozen.requires_grad_(False)
        self.a = torch.nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.b = torch.nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + x @ self.a.T @ self.b.T


def test_adapters():
    """The first fit sees B alone: its table leaves 2.5 to 5 times as much error."""
    model = torch.nn.Sequential(
        Adapted(784, 512), torch.nn.ReLU(), Adapted(512, 512), torch.nn.ReLU(), Adapted(512, 600)
    )
    compressor = ALQ(bits=8)
    told, exact, _ = train(model, distributed(model, compressor), 20, compressor)
    assert exact <= 0.0003
    assert 0.8 * exact <= told <= 1.25 * exact
    assert 2 <= compressor.parts.default.table_version <= 5
    assert_same_everywhere(compressor.levels.float(), "levels")
    schedule = compressor._training.updates.schedule.state_dict()
    assert hvd.allgather_object(schedule) == [schedule] * hvd.size()
