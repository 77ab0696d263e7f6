"""exchange="auto" inside stock hvd.DistributedOptimizer."""

from __future__ import annotations

import itertools
import logging

import horovod.torch as hvd
import pytest
import torch
from conftest import assert_same_everywhere, flat_parameters, learn, make_model, train
from rank_optimizers import distributed

from hvd_adaptive import ALQ, QSGD, Auto, RankMismatchError, SparseSGD

SEEDS = itertools.count(5000)


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
    optimizer = distributed(model, compressor, lr=0.3)
    with caplog.at_level(logging.INFO, "hvd_adaptive"):
        assert learn(model, optimizer) < 0.9
    assert_same_everywhere(flat_parameters(model), "auto")
    assert caplog.text.count("take, in milliseconds") == 1
    exchange = compressor._training.connection._binding.exchange
    lines = torch.tensor(list(exchange._lines.values()))
    assert_same_everywhere(lines, "auto.lines")
    assert compressor.report()["wire_bytes"] > 0


def test_ranks_that_differ_fail_before_they_measure():
    model = make_model()
    exchange = "auto" if hvd.rank() == 0 else "hierarchical"
    compressor = QSGD(exchange=exchange, seed=next(SEEDS))
    with pytest.raises(RankMismatchError, match="disagree on settings"):
        train(model, distributed(model, compressor, lr=0.3), 1)
    hvd.barrier()
