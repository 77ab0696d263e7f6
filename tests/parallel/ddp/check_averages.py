"""Averages against ones that are computed without DDP, bit for bit; damaged payloads."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from corrupt_alone import *  # noqa: F403
from ddp_oracles import (
    assert_same_everywhere,
    backward,
    gathered,
    make_net,
    own_gradients,
    wrap,
)
from exact_averages import check, test_compressed, test_warm_up  # noqa: F401
from scheme_cases import scheme
from simulated_steps import take_step
from torch import nn

from hvd_adaptive import Hierarchical
from hvd_adaptive.simulate import Ranks

RANKS = dist.get_world_size()

SCHEMES = {
    "huffman": scheme("alq-3-huffman", bucket_size=1000),
    "ecdq": scheme("ecdq-3"),
    "sparse": scheme("sparse-0.05"),
    # Half of the first layer never has a gradient: with all but ECDQ those rows stay exactly zero.
    "zeros": scheme("eden-2", keep_zeros=True),
}
EXCHANGES = ["allgather", "scatter_reduce", Hierarchical(ranks_per_node=2)]


@pytest.mark.parametrize("exchange", EXCHANGES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_first_step_is_simulates(scheme, exchange):
    """Update of tables included. DDP's first bucket holds the parameters in the model's order;
    numbers as names give simulate the same."""
    if RANKS == 2 and exchange not in ("allgather", "scatter_reduce"):
        pytest.skip("nothing is compressed in one node")
    net = make_net()
    net[0].bias.data[::2] = -1e3
    model, _ = wrap(net, SCHEMES[scheme](exchange=exchange), named=False, bucket_cap_mb=25)
    everyone = [gathered(gradient) for gradient in own_gradients(net, 0).values()]
    backward(model, 0)
    copies = [nn.Parameter(p.detach().clone()) for p in net.parameters()]
    named = [(str(i), p) for i, p in enumerate(copies)]
    ranks = Ranks(named, SCHEMES[scheme](exchange=exchange), RANKS)
    averages = take_step(ranks, 0, copies, zip(*everyone, strict=True))
    for parameter, average in zip(net.parameters(), averages, strict=True):
        assert torch.equal(parameter.grad, average)
    assert_same_everywhere(*(p.grad for p in net.parameters()))
    assert scheme == "ecdq" or not net[0].weight.grad[::2].any()
