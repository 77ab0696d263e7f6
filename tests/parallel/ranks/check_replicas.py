"""Parameters that differ between ranks, of Horovod's optimizers."""

from __future__ import annotations

import logging

import horovod.torch as hvd
import pytest
import torch
from nets import make_net, train
from rank_optimizers import Training
from replicas import *  # noqa: F403
from replicas import differing, told

from hvd_adaptive import QSGD


@pytest.mark.parametrize("frozen", [True, False])
def test_parameters_that_the_optimizer_does_not_hold(frozen, caplog):
    """Frozen ones are compared; those that require a gradient are others'."""
    net = make_net()
    net[0].weight.requires_grad_(not frozen)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(list(net.parameters())[1:], lr=0.1),
        named_parameters=net.named_parameters(),
        compression=QSGD(bits=4),
    )
    differing(net, hvd.rank(), hvd.size(), "0.weight")
    with caplog.at_level(logging.WARNING, "hvd_adaptive"):
        train(Training(net, None, optimizer=optimizer), hvd.rank(), range(2))
    assert len(told(caplog)) == frozen
