"""Simulated ranks against a loop written out by hand, and against plain torch."""

from __future__ import annotations

import pytest
import torch
from nets import flat_parameters
from scheme_cases import scheme
from torch import nn

from hvd_adaptive import ALQ, QSGD, simulate
from hvd_adaptive.coding.payload import read_header
from hvd_adaptive.kernels.random import stream_key

WORKERS = 3
SCHEMES = {
    "alq-paper": scheme("alq-3-paper", bucket_size=64, seed=7, update_steps=[]),
    "qsgd": scheme("qsgd-4-linf", bucket_size=100, tail="full"),
    "nuqsgd": scheme("nuqsgd-3", bucket_size=32, min_numel=0),
    "terngrad": scheme("terngrad", bucket_size=128, warmup_steps=2),
}


def make_model(seed: int = 0) -> nn.Module:
    """1,010 + 110 parameters; batch normalisation, so there are buffers."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(20, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 50), nn.Linear(50, 3)
    )


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(8, 20, generator=generator)
    return x, x[:, :3].argmax(1)


def backward(model: nn.Module, rank: int, step: int) -> None:
    model.zero_grad()
    x, y = batch(rank, step)
    nn.functional.cross_entropy(model(x), y).backward()


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3)


def laid_out(model: nn.Module, settings) -> tuple[torch.Tensor, int, list[nn.Parameter]]:
    """The one group of a small float32 model: parameters as registered, quantised ones first."""
    least = settings.min_numel
    ordered = sorted(model.parameters(), key=lambda p: p.numel() < least)  # which is stable
    quantized = sum(p.numel() for p in ordered if p.numel() >= least)
    if settings.tail == "full":
        quantized -= quantized % settings.bucket_size
    return torch.cat([p.grad.reshape(-1) for p in ordered]), quantized, ordered


@pytest.mark.parametrize("name", SCHEMES)
def test_training_equals_a_loop_written_by_hand(name):
    """Parameters, bit for bit, over four steps."""
    steps, compressor, own = 4, SCHEMES[name](), SCHEMES[name]()
    model, other = make_model(), make_model()
    keywords = {"optimizer": sgd, "compressor": compressor, "progress": False}
    result = simulate.train(model, batch, workers=WORKERS, steps=steps, **keywords)

    stepper, codec = sgd(other.parameters()), own.parts.default.payloads
    layout = simulate.Ranks(other.named_parameters(), own, 1).layout.fingerprint
    for step in range(steps):
        payloads = []
        for rank in range(WORKERS):
            backward(other, rank, step)
            flat, quantized, ordered = laid_out(other, own.settings)
            if step < own.settings.warmup_steps:
                quantized = 0
            key = stream_key(own.settings.seed, rank, step, 0)
            payloads.append(codec.encode(flat, quantized, key, layout).bytes)
        average = codec.sum(payloads, read_header(payloads[0]), 1 / WORKERS)
        parts = average.split([p.numel() for p in ordered])
        for parameter, part in zip(ordered, parts, strict=True):
            parameter.grad = part.view(parameter.shape)
        stepper.step()
        assert result.rows[step]["bits_per_coordinate"] == 8 * len(payloads[0]) / len(average)
    assert torch.equal(flat_parameters(model), flat_parameters(other))
    assert compressor.step == steps


def test_one_rank_without_compression_is_plain_torch():
    model, plain = make_model(), make_model()
    unused = nn.Parameter(torch.ones(5))  # no gradient: plain SGD leaves it alone
    model.register_parameter("unused", unused)
    simulate.train(model, batch, optimizer=sgd, workers=1, steps=6, progress=False)
    stepper = sgd(plain.parameters())
    for step in range(6):
        backward(plain, 0, step)
        stepper.step()
    trained = dict(model.state_dict())
    for name, value in plain.state_dict().items():  # buffers as well
        assert torch.equal(trained[name], value), name
    assert torch.equal(unused.detach(), torch.ones(5))


def test_float32_ranks_average_in_rank_order():
    model = make_model()
    ranks = simulate.Ranks(model.named_parameters(), None, WORKERS)
    gradients = []
    for rank in range(WORKERS):
        backward(model, rank, 0)
        gradients.append([p.grad.clone() for p in model.parameters()])
        ranks.take(rank)
    ranks.average(0)
    for parameter, *each in zip(model.parameters(), *gradients, strict=True):
        assert torch.equal(parameter.grad, (each[0] + each[1] + each[2]) * (1 / 3))
    ranks.restore(1)
    for parameter, own in zip(model.parameters(), gradients[1], strict=True):
        assert torch.equal(parameter.grad, own)


def test_missing_gradients_count_as_zeros():
    model = nn.ModuleDict({"a": nn.Linear(40, 40), "b": nn.Linear(40, 40)})
    ranks = simulate.Ranks(model.named_parameters(), QSGD(bits=8, bucket_size=40, norm="linf"), 2)
    model["a"].weight.sum().backward()
    ranks.take(0)
    model.zero_grad()
    (model["a"].weight.sum() + model["b"].weight.sum()).backward()
    ranks.take(1)
    ranks.average(0)
    assert torch.equal(model["a"].weight.grad, torch.ones(40, 40))
    assert torch.equal(model["b"].weight.grad, torch.full((40, 40), 0.5))
    assert torch.equal(model["b"].bias.grad, torch.zeros(40))


def test_refuses():
    with pytest.raises(ValueError, match="no parameter requires"):
        simulate.Ranks([], None, 2)
    with pytest.raises(ValueError, match="workers=0"):
        simulate.Ranks(make_model().named_parameters(), None, 0)
    embedding = nn.Embedding(10, 4, sparse=True)
    ranks = simulate.Ranks(embedding.named_parameters(), ALQ(), 1)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="weight: sparse"):
        ranks.take(0)


@pytest.mark.parametrize("scheme", [None, QSGD(bits=8, norm="linf")], ids=["exact", "qsgd"])
def test_averages_of_float16_are_of_float32_sums(scheme):
    """Three ranks with 40,000 each, whose sum and whose squares exceed float16."""
    weight = nn.Parameter(torch.zeros(2000, dtype=torch.float16))
    ranks = simulate.Ranks([("w", weight)], scheme, WORKERS)
    for rank in range(WORKERS):
        weight.grad = torch.linspace(-4e4, 4e4, 2000).half()
        ranks.take(rank)
    ranks.average(0)
    found = simulate.scatter(ranks.flats, 8192)
    assert (weight.grad - torch.linspace(-4e4, 4e4, 2000).half()).abs().max() <= 4e4 / 100
    assert ranks.relative_error == pytest.approx(0, abs=1e-4)
    assert found.variance == found.normalized == 0
