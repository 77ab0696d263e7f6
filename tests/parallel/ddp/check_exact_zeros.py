"""Coordinates that are zero on every rank do not move, with the hook as with Horovod."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ddp_oracles import assert_same_everywhere, wrap
from scheme_cases import EVERY, scheme
from settings_objects import exchange_of
from torch import nn

RANK = dist.get_rank()


class Words(nn.Module):
    """Two embeddings, of which one learns in a single row, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(2000, 16, padding_idx=0)
        self.frozen = nn.Embedding(128, 16)
        self.head = nn.Linear(16, 5)
        mask = torch.zeros(128, 1)
        mask[5] = 1
        self.frozen.weight.register_hook(lambda gradient: gradient * mask)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(words).mean(dim=1) + self.frozen(words % 128).mean(dim=1))


# The simulation, whose averages are the same, has every scheme with each exchange.
CASES = [
    (name, ("allgather", "scatter_reduce")[i % 2]) for i, name in enumerate((*EVERY, "alq-3-paper"))
]


@pytest.mark.parametrize(("name", "exchange"), CASES)
def test_adam_leaves_unused_and_masked_rows(name, exchange):
    net = Words()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    compressor = scheme(name)(
        bucket_size=1024, exchange=exchange_of(exchange, second_stage_bits=4), keep_zeros=True
    )
    model, _ = wrap(net, compressor)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + RANK)
        words = torch.randint(0, 999, (16, 20), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(words), words.sum(dim=1) % 5).backward()
        optimizer.step()
    table, frozen = net.table.weight.detach(), net.frozen.weight.detach()
    assert torch.equal(table[999:], before["table.weight"][999:]) and not table[0].any()
    assert (table[1:999] != before["table.weight"][1:999]).any(dim=1).float().mean() > 0.2
    assert not (frozen != before["frozen.weight"]).any(dim=1)[torch.arange(128) != 5].any()
    assert_same_everywhere(list(net.parameters()))
