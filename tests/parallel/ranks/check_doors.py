"""Checks of Horovod's optimizers that DDP shares, and more of the same subjects."""

from __future__ import annotations

from unittest.mock import patch

import horovod.torch as hvd
import pytest
import torch
from doors import *  # noqa: F403
from doors import DIFFERENT, EXCHANGES, SCHEMES, assert_independent, differing, numbers
from exact_averages import *  # noqa: F403
from feedback_doors import *  # noqa: F403
from nets import make_net, train
from training import Training, assert_same_everywhere, trained
from training import train as train_steps

from hvd_adaptive import QSGD, Tuning
from hvd_adaptive.transport.horovod_world import HorovodWorld


@pytest.mark.parametrize("frozen", [True, False])
def test_parameters_that_the_optimizer_does_not_hold(frozen, said):
    """Frozen ones are compared; those that require a gradient are others'."""
    net = make_net()
    net[0].weight.requires_grad_(not frozen)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(list(net.parameters())[1:], lr=0.1),
        named_parameters=net.named_parameters(),
        compression=QSGD(bits=4),
    )
    differing(net, hvd.rank(), hvd.size(), "0.weight")
    train(Training(net, None, optimizer=optimizer), hvd.rank(), range(2))
    assert len(said(DIFFERENT)) == frozen


@pytest.mark.ranks
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_ranks_that_count_differently_agree_on_a_number(errors, exchange):
    """A rank that has trained with more compressors, alone, has counted more."""
    for _ in range(3 * hvd.rank()):
        QSGD()._training.instance.bind()
    compressors = [SCHEMES["qcs"](**EXCHANGES[exchange]) for _ in range(2)]
    assert_independent(errors(compressors, 2))
    first, second = numbers(compressors)
    assert first != second and min(first, second) >= 3 * (hvd.size() - 1)
    assert_same_everywhere(torch.tensor([first, second]))


@pytest.mark.parametrize("worker", (True, False))
def test_ranks_share_the_weights(worker):
    """Though their gradients differ; and no collective is added to a step."""
    weights, wait = [], HorovodWorld.wait
    for feedback in (None, "auto"):
        keywords = {"error_feedback": feedback, "tuning": Tuning(worker=worker)}
        compressor = QSGD(bits=2, bucket_size=64, **keywords)
        model, optimizer = trained(compressor, 2)
        with patch.object(HorovodWorld, "wait", autospec=True, side_effect=wait) as own:
            for _ in range(3):
                train_steps(model, optimizer, 1)
                if feedback:
                    weights.append(compressor._training.residuals.weights.of(""))
        assert own.call_count == 3
    assert all(0 < weight < 0.5 for weight in weights) and len(set(weights)) == 3
    assert_same_everywhere(torch.tensor(weights, dtype=torch.float64))
