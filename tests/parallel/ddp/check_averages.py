"""Averages against ones that are computed without DDP, bit for bit; damaged payloads."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from corrupt_alone import *  # noqa: F403
from ddp_oracles import (
    assert_same_everywhere,
    backward,
    codec_average,
    gathered,
    make_net,
    own_gradients,
    wrap,
)
from exact_averages import check, test_compressed, test_warm_up  # noqa: F401
from scheme_cases import scheme

from hvd_adaptive import QSGD, Hierarchical
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
    seen, net = [], make_net()
    net[0].bias.data[::2] = -1e3
    model, _ = wrap(net, SCHEMES[scheme](exchange=exchange), named=False, seen=seen)
    own = own_gradients(net, 0)
    backward(model, 0)
    order = [name for name, _ in net.named_parameters()]
    assert seen == [(0, order)]

    parameters = dict(copy.deepcopy(net).named_parameters())
    named = [(str(i), parameters[name]) for i, name in enumerate(order)]
    ranks = Ranks(named, SCHEMES[scheme](exchange=exchange), RANKS)
    everyone = {name: gathered(gradient) for name, gradient in own.items()}
    for rank in range(RANKS):
        for name, gradients in everyone.items():
            parameters[name].grad = gradients[rank]
        ranks.take(rank)
    if ranks.due(0):
        ranks.refit(0)
    ranks.average(0)
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter.grad, parameters[name].grad), name
    assert_same_everywhere(*(p.grad for p in net.parameters()))
    assert scheme == "ecdq" or not net[0].weight.grad[::2].any()


@pytest.mark.parametrize("view", [False, True])
def test_later_steps_are_the_codecs(view):
    """DDP builds its buckets anew after the first step: three of them, sent while backward runs.

    A step that brings new buckets travels in the groups of those before. New buckets have the order
    of arrival, and their groups the reverse of it.
    """
    codec, compressor = (QSGD(bits=4, bucket_size=512) for _ in range(2))
    seen, net = [], make_net()
    options = {"bucket_cap_mb": 0.05, "gradient_as_bucket_view": view}
    model, state = wrap(net, compressor, seen=seen, **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    layouts: list[list[list[str]]] = []
    for step in range(4):
        own = own_gradients(net, step)
        seen.clear()
        backward(model, step)
        layouts.append([names for _, names in seen])
        groups = [names[::-1] for names in layouts[step - 1]] if step > 1 else layouts[0]
        expected = codec_average(codec, groups, own, step)
        for name, parameter in net.named_parameters():
            assert torch.equal(parameter.grad, expected[name]), (step, name)
        optimizer.step()
        assert state.compressor.step == step + 1
    assert layouts[0] != layouts[1] == layouts[2]  # before and after they were built anew
    assert_same_everywhere(net)
