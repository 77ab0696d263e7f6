"""Arrivals: which gradients are news, and how a group's coordinates are read."""

from __future__ import annotations

import pytest
import torch
from feedback_steps import OneRank

from hvd_adaptive import QSGD
from hvd_adaptive.run.arrivals import Arrivals

SIZES = (3000, 40, 50, 60)  # the last three share a group


def begun(on_news, every: bool = False) -> tuple[OneRank, Arrivals]:
    rank = OneRank(QSGD(bits=4, bucket_size=10, min_numel=1), SIZES, fusion=3000)
    assert [1, 2, 3] in [sorted(group.slots) for group in rank.layout.groups]
    return rank, Arrivals(rank, rank.layout, on_news, every)


@pytest.mark.parametrize("every", [False, True])
def test_news_are_the_first_gradient_and_complete_groups(every):
    news = []
    _, arrivals = begun(lambda: news.append(None), every)
    counts = []
    for slot in (1, 3, 2, 0):
        arrivals.arrive(slot, torch.ones(SIZES[slot]))
        counts.append(len(news))
    assert counts == ([1, 2, 3, 4] if every else [1, 1, 2, 3])


@pytest.mark.parametrize("contiguous", [True, False])
def test_the_gradient_of_a_group_of_its_own(contiguous):
    """It is read in its own memory if its coordinates are in order there."""
    rank, arrivals = begun(lambda: None)
    gradient = torch.arange(3000.0) if contiguous else torch.arange(6000.0)[::2]
    arrivals.arrive(0, gradient)
    arrivals.read()
    groups = [i for i, group in enumerate(rank.layout.groups) if 0 in group.slots]
    read = [arrivals.gather(index, changed=False).clone() for index in groups]
    assert torch.equal(torch.cat(read), gradient)
    first = arrivals.gather(groups[0], changed=False)
    assert (first.data_ptr() == gradient.data_ptr()) == contiguous
