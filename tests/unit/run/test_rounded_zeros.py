"""Zeros that a scheme rounds to other numbers are told of once, with what to do."""

from __future__ import annotations

import pytest
import torch
from scheme_cases import scheme
from settings_objects import exchange_of
from simulated_steps import take_step

from hvd_adaptive.parts import LOOKS
from hvd_adaptive.simulate import Ranks

ZERO = "exactly zero"


def run(compressor, steps: int = 2, rows: int = 1600, absent: bool = False) -> None:
    """Two ranks; ``rows`` of 2000 are zero on both, or there is no gradient."""
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((2000, 8), (3000,))]
    ranks = Ranks(zip(("words.weight", "dense"), parameters, strict=True), compressor, 2)
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        tables = [torch.randn(2000, 8, generator=draw) for _ in range(2)]
        for table in tables:
            table[:rows] = 0
        dense = torch.linspace(1, 2, 3000)
        own = [(None if absent else table, dense.clone()) for table in tables]
        take_step(ranks, step, parameters, own)
        compressor.step = step + 1


@pytest.mark.parametrize("exchange", ["allgather", "scatter_reduce"])
@pytest.mark.parametrize("name", ["eden-2", "ecdq-2", "signsgd", "alq-3-paper"])
def test_parameters_and_remedies_are_named(name, exchange, said):
    run(scheme(name)(exchange=exchange_of(exchange, second_stage_bits=4)))
    (message,) = said(ZERO)
    assert "'words.weight' (80%)" in message and "dense" not in message
    assert "keep_zeros=True" in message and "parameter_bits={'words.weight': None}" in message


@pytest.mark.parametrize(
    "compressor",
    [
        lambda: scheme("eden-2")(keep_zeros=True),
        lambda: scheme("eden-2")(parameter_bits={"words*": None}),
        lambda: scheme("alq-3")(),
        lambda: scheme("terngrad")(),
    ],
    ids=["kept", "full precision", "alq", "terngrad"],
)
def test_nothing_is_told_if_zeros_stay(compressor, said):
    run(compressor())
    assert not said(ZERO)


def test_little_and_missing_gradients_are_not_told_of(said):
    run(scheme("eden-2")(), rows=1400)
    run(scheme("eden-2")(), absent=True)
    assert not said(ZERO)


def test_it_is_told_after_a_warm_up_and_once_for_all_settings(said):
    compressor = scheme("eden-2")(warmup_steps=2)
    run(compressor, steps=2)
    assert not said(ZERO)
    run(compressor, steps=3)
    compressor.set(seed=5)
    run(compressor, steps=3)
    assert len(said(ZERO)) == 1


@pytest.mark.parametrize("name", ["eden-2", "ecdq-2", "signsgd", "alq-3-paper"])
def test_a_gradient_of_zeros_alone_stays_zero_and_is_looked_at_again(name, said, caplog):
    compressor = scheme(name)()
    run(compressor, steps=1, rows=2000)
    assert not said(ZERO)
    run(compressor, steps=2)
    assert len(said(ZERO)) == 1
    caplog.clear()
    compressor = scheme(name)()
    run(compressor, steps=LOOKS, rows=2000)
    run(compressor, steps=1)
    assert not said(ZERO)  # of parameters that are never used


def test_look_at_a_network_of_relus(said):
    """Half of its first gradient is zero, for black pixels and idle units; nothing is wrong."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(400, 64), torch.nn.ReLU(), torch.nn.Linear(64, 5))
    ranks = Ranks(list(net.named_parameters()), scheme("eden-2")(min_numel=0), 2)
    images = torch.rand(8, 400) * (torch.arange(400) < 220)
    net(images).square().mean().backward()
    own = [p.grad for p in net.parameters()]
    assert (own[0] == 0).float().mean() > 0.45
    take_step(ranks, 0, list(net.parameters()), [[g.clone() for g in own] for _ in range(2)])
    assert not said(ZERO)
