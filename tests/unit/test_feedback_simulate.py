"""Error feedback of simulated ranks: each rank's own, the same bits as a rank by itself."""

from __future__ import annotations

import pytest
import torch
from feedback_steps import gradients
from torch import nn

from hvd_adaptive import ALQ, QSGD, simulate
from hvd_adaptive.coding.payload import read_header
from hvd_adaptive.kernels.random import stream_key
from hvd_adaptive.simulate.ranks import Ranks

SIZES = [700, 30, 450]
WORKERS = 3


def ranks_of(compressor) -> tuple[Ranks, list[nn.Parameter]]:
    parameters = [nn.Parameter(torch.zeros(n)) for n in SIZES]
    return Ranks(zip("abc", parameters, strict=True), compressor, WORKERS), parameters


def take(ranks: Ranks, parameters, step: int) -> list[list[torch.Tensor]]:
    own = [gradients(SIZES, 10 * step + rank) for rank in range(WORKERS)]
    for rank in range(WORKERS):
        for parameter, gradient in zip(parameters, own[rank], strict=True):
            parameter.grad = gradient.clone()
        ranks.take(rank)
    return own


def make(weight, **keywords) -> QSGD:
    return QSGD(bits=3, bucket_size=64, min_numel=100, error_feedback=weight, **keywords)


@pytest.mark.parametrize("weight", (1.0, 0.3))
def test_averages_bit_for_bit_by_hand(weight):
    """Eqs 14a-d for each rank, payloads summed in rank order."""
    compressor = make(weight, warmup_steps=1)
    ranks, parameters = ranks_of(compressor)
    r = [torch.zeros(1150) for _ in range(WORKERS)]
    for step in range(4):
        own = take(ranks, parameters, step)
        ranks.average(step)
        payloads = []
        for rank, (a, b, c) in enumerate(own):
            flat = torch.cat([a, c, b])  # quantised ones first
            key, layout = stream_key(0, rank, step, 0), ranks.layout.fingerprint
            if step == 0:
                payloads.append(
                    compressor.parts.default.payloads.encode(flat, 0, key, layout).bytes
                )
                continue
            z = torch.add(flat[:1150], r[rank], alpha=weight)
            payload = compressor.parts.default.payloads.encode(
                torch.cat([z, b]), 1150, key, layout
            ).bytes
            received = compressor.decode(payload)[:1150]
            r[rank] = torch.add(z, r[rank], alpha=1 - weight) - received
            payloads.append(payload)
        mean = compressor.parts.default.payloads.sum(
            payloads, read_header(payloads[0]), 1 / WORKERS
        )
        for slot, part in zip((0, 2, 1), mean.split([700, 450, 30]), strict=True):
            assert torch.equal(parameters[slot].grad, part)


def test_nothing_is_lost():
    ranks, parameters = ranks_of(make(0.3))
    given = [torch.zeros(n) for n in SIZES]
    applied = [torch.zeros(n) for n in SIZES]
    for step in range(5):
        for gradients_of_rank in take(ranks, parameters, step):
            for total, gradient in zip(given, gradients_of_rank, strict=True):
                total += gradient / WORKERS
        ranks.average(step)
        for total, parameter in zip(applied, parameters, strict=True):
            total += parameter.grad
    named = [r.state_dict()["residuals"]["parameters"] for r in ranks.residuals]
    for i, name in enumerate("abc"):
        held = sum(of_rank.get(name, torch.zeros(SIZES[i])) for of_rank in named) / WORKERS
        torch.testing.assert_close(applied[i] + held, given[i], rtol=0, atol=1e-5)
    assert not torch.equal(named[0]["a"], named[1]["a"])


def test_gradients_that_were_taken_do_not_change():
    ranks, parameters = ranks_of(make(1.0))
    for step in range(2):
        take(ranks, parameters, step)
        before = [flat.clone() for flat in ranks.flats]
        ranks.average(step)
        assert all(torch.equal(a, b) for a, b in zip(ranks.flats, before, strict=True))


def test_a_step_that_is_not_finite_leaves_residuals_alone():
    ranks, parameters = ranks_of(make(0.3))
    take(ranks, parameters, 0)
    ranks.average(0)
    before = ranks.residuals[0].state_dict()["residuals"]["parameters"]
    take(ranks, parameters, 1)
    ranks.flats[0][1][5] = float("nan")
    ranks.average(1)
    after = ranks.residuals[0].state_dict()["residuals"]["parameters"]
    assert all(torch.equal(before[name], after[name]) for name in "ac")


def test_tables_are_fitted_to_what_is_quantised():
    """One rank, all buckets sampled: the table is that of g + β r."""
    compressor = ALQ(bits=3, bucket_size=50, min_numel=0, error_feedback=1.0, update_steps=[1])
    parameter = nn.Parameter(torch.zeros(1000))
    ranks = Ranks([("a", parameter)], compressor, 1)
    for step in range(2):
        (parameter.grad,) = gradients([1000], step)
        ranks.take(0)
        if step == 1:
            residual = ranks.residuals[0].state_dict()["residuals"]["parameters"]["a"]
            alone = ALQ(bits=3, bucket_size=50)
            alone.fit(parameter.grad + residual)
            ranks.refit(1)
            torch.testing.assert_close(compressor.levels, alone.levels)
        ranks.average(step)


def test_training_with_and_without():
    """The first step is the same, then residuals join in; both learn."""
    x = torch.randn(256, 100, generator=torch.Generator().manual_seed(1))
    y = x[:, :5].argmax(1)
    losses = {}
    for weight in (None, 0.1):
        torch.manual_seed(0)
        model = nn.Linear(100, 5)
        result = simulate.train(
            model,
            (x, y),
            optimizer=lambda p: torch.optim.SGD(p, lr=0.2),
            workers=2,
            compressor=QSGD(bits=2, bucket_size=100, min_numel=0, error_feedback=weight),
            steps=30,
            batch_size=32,
            progress=False,
        )
        losses[weight] = [row["loss"] for row in result.rows]
        assert sum(losses[weight][-5:]) < 0.95 * sum(losses[weight][:5])
    assert losses[None][0] == losses[0.1][0] and losses[None][-1] != losses[0.1][-1]
