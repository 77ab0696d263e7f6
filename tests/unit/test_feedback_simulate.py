"""Error feedback of simulated ranks: each rank's own, the same bits as a rank by itself."""

from __future__ import annotations

import pytest
import torch
from feedback_steps import gradients
from torch import nn

from hvd_adaptive import QSGD
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
