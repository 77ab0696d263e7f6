"""LocalSGD over torch.distributed."""

import gc

import pytest
import torch
from fragment_rounds import *  # noqa: F403
from fsdp_nets import make, sharded
from local_rounds import *  # noqa: F403

from hvd_adaptive import LocalSGD
from hvd_adaptive.hooks.wrapped_optimizer import UNFINISHED


def test_a_model_of_fsdp2_is_refused():
    inner = torch.optim.SGD(sharded(make()).parameters(), 0.1)
    with pytest.raises(ValueError, match=r"^optimizer: its parameters must not be DTensors"):
        LocalSGD(inner, every=2)


@pytest.mark.parametrize("keywords", [{}, {"delay": 2}, {"fragments": 2}])
@pytest.mark.parametrize("end", ["none", "finish", "average", "state_dict"])
def test_a_training_that_ends_within_a_round(rank, end, keywords, freed, said):
    """A warning, unless its parameters are averaged or saved."""
    net = torch.nn.Linear(4, 4)
    for p in net.parameters():
        torch.nn.init.ones_(p)
    optimizer = LocalSGD(torch.optim.SGD(net.parameters(), 0.1), every=4, **keywords)
    for _ in range(4 if keywords.get("delay") else 6):
        net(torch.full((1, 4), 1.0 + rank)).sum().backward()
        optimizer.step()
    if end != "none":
        getattr(optimizer, end)()
    del optimizer
    gc.collect()
    assert len(said(UNFINISHED)) == int(end == "none" and rank == 0)
