"""Statistics go to the first rank, and its table comes back to all."""

from __future__ import annotations

import sys

import horovod.torch as hvd
import numpy as np
import pytest
from check_training import distributed
from conftest import assert_same_everywhere, flat_parameters, make_model, train

from hvd_adaptive import ALQ
from hvd_adaptive.exchange.level_sync import LevelSync
from hvd_adaptive.exchange.world import World


def test_every_rank_gets_what_the_first_makes_of_all():
    sync = LevelSync(World(), "check.sync")
    own = np.array([hvd.rank(), 2.0**-40 * hvd.rank(), -1.0])
    table = sync(own, lambda rows: np.concatenate(rows))
    wanted = [number for rank in range(hvd.size()) for number in (rank, 2.0**-40 * rank, -1.0)]
    assert table.tolist() == wanted


def test_a_fit_that_fails_is_told_on_every_rank():
    def fail(rows):
        raise ZeroDivisionError

    with pytest.raises(RuntimeError, match="the first rank could not fit"):
        LevelSync(World(), "check.sync.fails")(np.zeros(3), fail)


def test_training_where_one_rank_has_no_mpi4py(monkeypatch):
    if hvd.rank() == 1:
        monkeypatch.setitem(sys.modules, "mpi4py", None)
    model, compressor = make_model(), ALQ(bucket_size=512, seed=77, update_steps=[0, 1])
    train(model, distributed(model, compressor), 2)
    assert compressor.table_version == 2
    assert_same_everywhere(flat_parameters(model), "parameters")
