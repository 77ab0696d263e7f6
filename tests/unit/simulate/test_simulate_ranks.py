"""Simulated ranks against a loop written out by hand, and against plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scheme_cases import scheme
from torch import nn

from hvd_adaptive import ALQ, QSGD, simulate
from hvd_adaptive.adapt.statistics import HistogramStatistic
from hvd_adaptive.coding.payload import read_header
from hvd_adaptive.kernels.random import Use, stream_key
from hvd_adaptive.levels import LOG_EDGES

WORKERS = 3
FITS = {"alq": [0, 2], "alq-n": [1], "alq-paper": [0], "amq": [0]}
SCHEMES = {
    "alq": scheme("alq-3", bucket_size=64, seed=7, update_steps=FITS["alq"], samples=4),
    "alq-n": scheme("alq-4-n", bucket_size=50, update_steps=FITS["alq-n"], samples=3),
    "alq-paper": scheme("alq-3-paper", bucket_size=64, update_steps=FITS["alq-paper"], samples=4),
    "amq": scheme("amq-3", bucket_size=64, seed=2, update_steps=FITS["amq"]),
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


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3)


def parameters_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def laid_out(model: nn.Module, settings) -> tuple[torch.Tensor, int, list[nn.Parameter]]:
    """The one group of a small float32 model: parameters as registered, quantised ones first."""
    by_name = dict(model.named_parameters())
    large = [n for n in by_name if by_name[n].numel() >= settings.min_numel]
    small = [n for n in by_name if n not in large]
    ordered = [by_name[n] for n in large + small]
    quantized = sum(by_name[n].numel() for n in large)
    if settings.tail == "full":
        quantized -= quantized % settings.bucket_size
    return torch.cat([p.grad.reshape(-1) for p in ordered]), quantized, ordered


def buckets_by_hand(flat: torch.Tensor, quantized: int, compressor, rank: int, step: int):
    """The documented draw: Philox keyed by the sample stream, without replacement, in order; the
    partial bucket is always drawn, and all weigh what they stand for, 1 on average."""
    size = compressor.settings.bucket_size
    whole, rest = divmod(quantized, size)
    key = stream_key(compressor.settings.seed, rank, step, Use.SAMPLE)
    draw = np.random.Generator(np.random.Philox(key=key))
    count = compressor.parts.default.adaptation.samples - bool(rest)
    chosen = np.sort(draw.choice(whole, count, replace=False))
    buckets = [flat[i * size : (i + 1) * size] for i in chosen]
    if not rest:
        return buckets, [1.0] * count
    scale = (count + 1) / (whole + 1)
    weights = [whole / count * scale] * count + [scale]
    return [*buckets, flat[whole * size : quantized]], weights


def fit_by_hand(compressor, sampled) -> None:
    """Pool all ranks' histograms, fit, install: ALQ Algorithm 1, lines 2 to 5.

    sampled: for each rank the histograms of the last steps, the last one of this step. Each rank's
    steps have the same sum of r² ||v||².
    """
    middles = (LOG_EDGES[:-1] + LOG_EDGES[1:]) / 2
    pooled = []
    for steps in sampled:
        total = np.zeros((3, len(middles) + 3))
        for own in np.reshape(steps, (-1, *total.shape)):
            of_now, of_then = (
                table[0, :-1] @ np.concatenate([middles**2, [0, 1]])
                for table in (np.reshape(steps[-1], total.shape), own)
            )
            factor = of_now / of_then
            total += own * [[factor], [1.0], [factor**2]]
        pooled.append(total.reshape(-1))
    law = HistogramStatistic().pool(pooled, compressor.parts.default.adaptation.normalized)
    codec = compressor.parts.default
    codec.install(codec.fit_magnitudes(law, codec.table), codec.table_version + 1)


def sampled_by_hand(compressor, flat, quantized, rank, step) -> np.ndarray:
    buckets, weights = buckets_by_hand(flat, quantized, compressor, rank, step)
    norms = [norm_of(b, compressor.parts.default.norm) for b in buckets]
    return HistogramStatistic().collect(buckets, norms, weights)


def norm_of(bucket: torch.Tensor, norm: str) -> float:
    from hvd_adaptive import kernels

    return float(kernels.for_device(bucket.device).bucket_norms(bucket, bucket.numel(), norm)[0])


@pytest.mark.parametrize("name", SCHEMES)
def test_training_equals_a_loop_written_by_hand(name):
    """Parameters, bit for bit, and tables, over four steps."""
    steps, compressor, fits = 4, SCHEMES[name](), FITS.get(name, [])
    model = make_model()
    keywords = {"optimizer": sgd, "compressor": compressor, "progress": False}
    result = simulate.train(model, batch, workers=WORKERS, steps=steps, **keywords)

    own, other = SCHEMES[name](), make_model()
    stepper = sgd(other.parameters())
    layout = simulate.Ranks(other.named_parameters(), own, 1).layout.fingerprint
    sampled: list[list[np.ndarray]] = [[] for _ in range(WORKERS)]
    for step in range(steps):
        flats = []
        for rank in range(WORKERS):
            other.zero_grad()
            x, y = batch(rank, step)
            nn.functional.cross_entropy(other(x), y).backward()
            flat, quantized, ordered = laid_out(other, own.settings)
            flats.append(flat)
        if any(step <= fit for fit in fits):
            for rank, flat in enumerate(flats):
                sampled[rank].append(sampled_by_hand(own, flat, quantized, rank, step))
        if step in fits:
            fit_by_hand(own, sampled)
        if step < own.settings.warmup_steps:
            quantized = 0
        payloads = [
            own.parts.default.payloads.encode(
                f, quantized, stream_key(own.settings.seed, rank, step, 0), layout
            ).bytes
            for rank, f in enumerate(flats)
        ]
        average = own.parts.default.payloads.sum(payloads, read_header(payloads[0]), 1 / WORKERS)
        parts = average.split([p.numel() for p in ordered])
        for parameter, part in zip(ordered, parts, strict=True):
            parameter.grad = part.view(parameter.shape)
        stepper.step()
        assert result.rows[step]["bits_per_coordinate"] == 8 * len(payloads[0]) / len(average)
    assert torch.equal(parameters_of(model), parameters_of(other))
    # Sums over steps are in another order here.
    torch.testing.assert_close(compressor.levels, own.levels, rtol=1e-12, atol=0)
    assert compressor.parts.default.table_version == own.parts.default.table_version
    assert compressor.step == steps


def test_one_rank_without_compression_is_plain_torch():
    model, plain = make_model(), make_model()
    unused = nn.Parameter(torch.ones(5))  # no gradient: plain SGD leaves it alone
    model.register_parameter("unused", unused)
    simulate.train(model, batch, optimizer=sgd, workers=1, steps=6, progress=False)
    stepper = sgd(plain.parameters())
    for step in range(6):
        stepper.zero_grad()
        x, y = batch(0, step)
        nn.functional.cross_entropy(plain(x), y).backward()
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
        model.zero_grad()
        x, y = batch(rank, 0)
        nn.functional.cross_entropy(model(x), y).backward()
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
