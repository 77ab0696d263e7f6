"""LocalSGD over Horovod: rounds, uneven ends, ranks that differ."""

from __future__ import annotations

import horovod.torch as hvd
import local_rounds
import pytest


@pytest.mark.parametrize("scheme", local_rounds.SCHEMES)
@pytest.mark.parametrize("outer", local_rounds.OUTER)
def test_rounds_are_simulates(scheme, outer):
    local_rounds.check_rounds(hvd.rank(), hvd.size(), scheme, outer)


@pytest.mark.parametrize("ended", [5, 6])
def test_ranks_may_end_apart(ended):
    local_rounds.check_uneven_ends(hvd.rank(), hvd.size(), ended)


def test_parameters_become_their_mean():
    local_rounds.check_mean(hvd.rank(), hvd.size())


@pytest.mark.parametrize("differs", local_rounds.TOLD)
def test_ranks_that_differ_are_told(differs):
    local_rounds.check_ranks_that_differ(hvd.rank(), differs)
