"""exchange="auto" inside stock hvd.DistributedOptimizer."""

from __future__ import annotations

import itertools
import logging

import horovod.torch as hvd
import pytest
import torch
from conftest import assert_same_everywhere, flat_parameters, learn, make_model, train

from hvd_adaptive import ALQ, QSGD, Auto, RankMismatchError, SparseSGD
from hvd_adaptive.exchange import auto

SEEDS = itertools.count(5000)


def distributed(model, compressor):
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.3),
        named_parameters=model.named_parameters(),
        compression=compressor,
    )


def in_nodes(**keywords):
    return SparseSGD(density=0.1, **keywords)


@pytest.mark.parametrize(
    "make",
    [
        lambda **k: ALQ(bits=3, bucket_size=1024, fusion_bytes=60_000, **k),
        lambda **k: QSGD(bits=4, bucket_size=512, error_feedback=0.2, **k),
        in_nodes,
    ],
    ids=["alq", "feedback", "nodes"],
)
def test_measures_once_and_all_ranks_choose_alike(make, caplog):
    exchange = Auto(ranks_per_node=max(1, hvd.size() // 2)) if make is in_nodes else "auto"
    model, compressor = make_model(), make(exchange=exchange, seed=next(SEEDS))
    optimizer = distributed(model, compressor)
    with caplog.at_level(logging.INFO, "hvd_adaptive"):
        assert learn(model, optimizer) < 0.9
    assert_same_everywhere(flat_parameters(model), "auto")
    assert caplog.text.count("take, in milliseconds") == 1
    exchange = compressor._training.connection._binding.exchange
    lines = torch.tensor(list(exchange._lines.values()))
    assert_same_everywhere(lines, "auto.lines")
    assert compressor.report()["wire_bytes"] > 0


@pytest.mark.parametrize("label", ["float32", "bfloat16", "allgather", "scatter_reduce"])
def test_each_choice_trains(label, monkeypatch):
    """As if that candidate had been measured to be the fastest."""
    if label == "scatter_reduce" and hvd.size() == 2:
        pytest.skip("two ranks gather")

    def pretended(exchange, world, compressor, size, name, device):
        return 1.0 if name.endswith(f".{label}") else 2.0

    monkeypatch.setattr(auto, "measure", pretended)
    model, compressor = make_model(), ALQ(exchange="auto", bucket_size=512, seed=next(SEEDS))
    losses = train(model, distributed(model, compressor), 12)
    assert_same_everywhere(flat_parameters(model), label)
    assert sum(losses[-4:]) < sum(losses[:4])
    groups = compressor._training.layout.groups
    plain = label in ("float32", "bfloat16")
    exchange = compressor._training.connection._binding.exchange
    assert all((exchange.quantized(group) == 0) == plain for group in groups)
    bits = {"float32": 32, "bfloat16": 16, "allgather": 3, "scatter_reduce": 3}[label]
    assert compressor.report()["bits_per_coordinate"] == pytest.approx(bits, rel=0.4)


def test_ranks_that_differ_fail_before_they_measure():
    model = make_model()
    exchange = "auto" if hvd.rank() == 0 else "hierarchical"
    compressor = QSGD(exchange=exchange, seed=next(SEEDS))
    with pytest.raises(RankMismatchError, match="disagree on settings"):
        train(model, distributed(model, compressor), 1)
    hvd.barrier()
