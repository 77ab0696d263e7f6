"""Averages against ones that are computed without DDP, bit for bit; damaged payloads."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from corrupt_alone import *  # noqa: F403
from ddp_oracles import assert_same_everywhere, backward, gathered, make_net, own_gradients, wrap
from exact_averages import check, test_compressed, test_warm_up  # noqa: F401
from scheme_cases import scheme
from simulated_steps import take_step
from torch import nn

from hvd_adaptive import QSGD, Hierarchical
from hvd_adaptive.ddp import compression_hook
from hvd_adaptive.kernels.random import stream_key
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


def codec_average(scheme, buckets, own, step):
    """What an allgather of one payload for each bucket of names, which are in the order of launch,
    gives: every rank's payload encoded here, by ``scheme``, and decoded and added in rank order."""
    results = {}
    for place, names in enumerate(buckets):
        large = [n for n in names if own[n].numel() >= scheme.settings.min_numel]
        order = large + [n for n in names if n not in large]
        flat = torch.cat([own[name].reshape(-1) for name in order])
        quantized = sum(own[name].numel() for name in large)
        total = torch.zeros_like(flat)
        for rank, of_rank in enumerate(gathered(flat)):
            key = stream_key(scheme.settings.seed, rank, step, len(buckets) - 1 - place)
            payload = scheme.parts.default.payloads.encode(of_rank, quantized, key)
            total += scheme.decode(payload.bytes)
        average = total * (1 / RANKS)
        for name, part in zip(order, average.split([own[n].numel() for n in order]), strict=True):
            results[name] = part.view(own[name].shape)
    return results


@pytest.mark.parametrize("view", [False, True])
def test_later_steps_are_the_codecs(view):
    """DDP builds its buckets anew after the first step: three of them, sent while backward runs.

    A step that brings new buckets travels in the groups of those before. New buckets have the order
    of arrival, and their groups the reverse of it.
    """
    codec, compressor = (QSGD(bits=4, bucket_size=512) for _ in range(2))
    net, seen = make_net(), []
    names = {id(parameter): name for name, parameter in net.named_parameters()}

    def noting(state, bucket):
        seen.append([names[id(p)] for p in bucket.parameters()])
        return compression_hook(state, bucket)

    options = {"bucket_cap_mb": 0.05, "gradient_as_bucket_view": view}
    model, state = wrap(net, compressor, hook=noting, **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    layouts: list[list[list[str]]] = []
    for step in range(4):
        own = own_gradients(net, step)
        seen.clear()
        backward(model, step)
        layouts.append(list(seen))
        groups = [names[::-1] for names in layouts[step - 1]] if step > 1 else layouts[0]
        expected = codec_average(codec, groups, own, step)
        for name, parameter in net.named_parameters():
            assert torch.equal(parameter.grad, expected[name]), (step, name)
        optimizer.step()
        assert state.compressor.step == step + 1
    assert layouts[0] != layouts[1] == layouts[2]  # before and after they were built anew
    assert_same_everywhere(net)
