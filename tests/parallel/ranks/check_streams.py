"""Which random numbers compressors have, whatever other ranks count."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from conftest import assert_same_everywhere
from random_streams import *  # noqa: F403
from random_streams import EXCHANGES, SCHEMES, N, assert_independent, errors_of, numbers

from hvd_adaptive import ALQ, QSGD, instances

pytestmark = pytest.mark.ranks


@pytest.fixture
def errors(door, gather, rank):
    """Of averages of compressors in so many steps."""
    return lambda compressors, steps: errors_of(door, gather, rank, compressors, steps)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_ranks_that_count_differently_agree_on_a_number(errors, exchange):
    """A rank that has trained with more compressors, alone, has counted more."""
    for _ in range(3 * hvd.rank()):
        QSGD()._training.instance.bind()
    compressors = [SCHEMES["qcs"](**EXCHANGES[exchange]) for _ in range(2)]
    assert_independent(errors(compressors, 2))
    first, second = numbers(compressors)
    assert first != second and min(first, second) >= 3 * (hvd.size() - 1)
    assert_same_everywhere(torch.tensor([first, second]), "numbers")


def test_what_is_built_beside_does_not_count(errors):
    """Parts, second stages and fitted copies on all ranks. One that encodes on a single rank does,
    and all ranks agree."""
    if hvd.rank() == 0:
        QSGD().encode(torch.randn(N))
    compressor = ALQ(bits=3, parameter_bits={"a": 4}, exchange="scatter_reduce")
    errors([compressor], 1)
    compressor.set(bits=4)
    assert_same_everywhere(torch.tensor(numbers([compressor])), "number")
    compressors = [QSGD(bits=3) for _ in range(2)]
    errors(compressors, 1)
    assert len({*numbers(compressors), compressor._training.instance.number}) == 3


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
        if resumed:
            new = QSGD(bits=3)
            errors([new], 1)
            assert new._training.instance.number == 2
    assert torch.equal(*kept)
