"""Checks of Horovod's optimizers that DDP shares, and more of the same subjects."""

from __future__ import annotations

import logging

import horovod.torch as hvd
import pytest
import torch
from doors import *  # noqa: F403
from doors import EXCHANGES, SCHEMES, N, assert_independent, differing, numbers, told
from exact_averages import *  # noqa: F403
from nets import make_net, train
from training import Training, assert_same_everywhere

from hvd_adaptive import ALQ, QSGD, instances


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


@pytest.mark.ranks
def test_what_is_built_beside_does_not_count(errors):
    """Parts, second stages and fitted copies on all ranks. One that encodes on a single rank does,
    and all ranks agree."""
    if hvd.rank() == 0:
        QSGD().encode(torch.randn(N))
    compressor = ALQ(bits=3, parameter_bits={"a": 4}, exchange="scatter_reduce")
    errors([compressor], 1)
    compressor.set(bits=4)
    assert_same_everywhere(torch.tensor(numbers([compressor])))
    compressors = [QSGD(bits=3) for _ in range(2)]
    errors(compressors, 1)
    assert len({*numbers(compressors), *numbers([compressor])}) == 3


@pytest.mark.ranks
def test_a_resumed_run_of_two_optimizers_repeats(errors):
    """States of both, loaded in another order and beside a new compressor."""
    kept = []
    for resumed in (False, True):
        instances.start_over()
        compressors = [QSGD(bits=3) for _ in range(2)]
        errors(compressors, 1)
        if resumed:
            saved = [compressor.state_dict() for compressor in compressors]
            instances.start_over()
            compressors = [QSGD(bits=3) for _ in range(2)]
            for place in (1, 0):
                compressors[place].load_state_dict(saved[place])
        kept.append(torch.stack(errors(compressors, 2)))
    new = QSGD(bits=3)
    errors([new], 1)
    assert numbers([new]) == [2]
    assert torch.equal(*kept)
