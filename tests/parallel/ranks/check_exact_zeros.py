"""Coordinates that are zero on every rank do not move: rows, masks, embeddings, models."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from conftest import assert_same_everywhere
from rank_optimizers import distributed
from scheme_cases import scheme

from hvd_adaptive import Hierarchical, ScatterReduce

EXCHANGES = {
    "allgather": {"exchange": "allgather"},
    "scatter_reduce": {"exchange": ScatterReduce(second_stage_bits=4)},
    "hierarchical": {"exchange": Hierarchical(ranks_per_node=1, second_stage_bits=4)},
}
ROWS, WIDTH = 2000, 8
# Unit tests simulate every scheme.
CASES = ("alq-3-paper", "alq-3-huffman", "ecdq-2", "eden-2", "orq-9")


def make(name: str, exchange: str = "allgather", **keywords):
    keywords = EXCHANGES[exchange] | {"bucket_size": 1024} | keywords
    keywords = {"keep_zeros": True} | keywords
    return scheme(name)(**keywords)


def zero_rows(pattern: str) -> torch.Tensor:
    """Rows that are zero on all ranks."""
    rows = torch.zeros(ROWS, dtype=torch.bool)
    rows[777 if pattern == "one row" else torch.arange(0, ROWS, 2)] = True
    return rows


@pytest.mark.parametrize("pattern", ["one row", "half of the rows"])
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("name", CASES)
def test_rows_of_zeros_stay_as_they_are(name, exchange, pattern):
    model = {"table": torch.nn.Parameter(torch.randn(ROWS, WIDTH))}
    before, rows = model["table"].detach().clone(), zero_rows(pattern)
    optimizer = distributed(model, make(name, exchange), lr=1.0)
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + hvd.rank())
        weights = torch.randn(ROWS, WIDTH, generator=generator)
        weights[rows] = 0.0
        weights[torch.rand(ROWS, generator=generator) < 0.1] = -0.0  # on this rank
        optimizer.zero_grad()
        (model["table"] * weights).sum().backward()
        optimizer.step()
    table = model["table"].detach()
    assert torch.equal(table[rows], before[rows])
    assert (table[~rows] != before[~rows]).any(dim=1).float().mean() > 0.5
    assert_same_everywhere(table, f"{name}.{exchange}.{pattern}")


@pytest.mark.parametrize("exchange", ["allgather", "scatter_reduce"])
@pytest.mark.parametrize("name", ["alq-3-paper", "ecdq-2", "signsgd"])
def test_adam_leaves_unused_and_padding_rows_as_they_are(name, exchange):
    """Of an embedding; and a mask lets one row of another learn."""
    model = torch.nn.ModuleDict(
        {
            "table": torch.nn.Embedding(2000, 64, padding_idx=0),
            "frozen": torch.nn.Embedding(128, 64),
            "head": torch.nn.Linear(64, 5),
        }
    )
    mask = torch.zeros(128, 1)
    mask[5] = 1
    model["frozen"].weight.register_hook(lambda gradient: gradient * mask)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.01),
        named_parameters=model.named_parameters(),
        compression=make(name, exchange, bucket_size=8192),
    )
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + hvd.rank())
        words = torch.randint(0, 999, (16, 20), generator=generator)
        optimizer.zero_grad()
        features = model["table"](words).mean(dim=1) + model["frozen"](words % 128).mean(dim=1)
        scores = model["head"](features)
        torch.nn.functional.cross_entropy(scores, words.sum(dim=1) % 5).backward()
        optimizer.step()
    table, frozen = (model[name].weight.detach() for name in ("table", "frozen"))
    assert torch.equal(table[999:], before["table.weight"][999:]) and not table[0].any()
    assert (table[1:999] != before["table.weight"][1:999]).any(dim=1).float().mean() > 0.3
    moved = (frozen != before["frozen.weight"]).any(dim=1)
    assert moved.nonzero().tolist() == [[5]]
    assert_same_everywhere(table, f"table.{name}.{exchange}")
