"""LocalSGD over Horovod."""

from __future__ import annotations

import horovod.torch as hvd
import local_rounds
import pytest
from fragment_rounds import *  # noqa: F403
from list_averages import MAKERS
from local_rounds import *  # noqa: F403

pytestmark = pytest.mark.ranks


def test_process_sets_train_by_themselves():
    """Even and odd ranks; with two ranks each is alone, and exchanges nothing."""
    sets = [hvd.add_process_set(list(range(first, hvd.size(), 2))) for first in (0, 1)]
    mine = sets[hvd.rank() % 2]
    make = MAKERS["alq"] if mine.size() > 1 else None
    local_rounds.check_simulation(mine.rank(), [6] * mine.size(), "whole", make, process_set=mine)
    hvd.barrier()
    for one in sets:
        hvd.remove_process_set(one)
