"""Tables travel over MPI only where every rank can use it."""

from __future__ import annotations

import itertools
import logging
import sys

import horovod.torch as hvd
import numpy as np
import pytest
from check_training import distributed
from conftest import assert_same_everywhere, flat_parameters, make_model, train

from hvd_adaptive import ALQ
from hvd_adaptive.exchange.level_sync import LevelSync
from hvd_adaptive.exchange.world import World

NAMES = itertools.count()


def sync_of(monkeypatch, without: int | None) -> LevelSync:
    """Level sync of all ranks, one of which has no mpi4py."""
    if hvd.rank() == without:
        monkeypatch.setitem(sys.modules, "mpi4py", None)
    return LevelSync(World(), f"check.sync.{next(NAMES)}")


@pytest.mark.parametrize("without", [None, 0, 1], ids=["all", "not_0", "not_1"])
def test_one_transport(without, monkeypatch, caplog):
    with caplog.at_level(logging.WARNING, "hvd_adaptive"):
        sync = sync_of(monkeypatch, without)
    over_mpi = without is None and hvd.mpi_enabled()
    assert (sync._comm is not None) is over_mpi
    if hvd.mpi_enabled() and without is not None:
        own = "mpi4py cannot be imported"
        told = own if hvd.rank() == without else f"ranks [{without}] cannot use mpi4py"
        assert told in caplog.text
    else:
        assert not caplog.records
    table = sync(np.full(3, float(hvd.rank())), lambda rows: np.sum(rows, axis=0))
    assert table.tolist() == [hvd.size() * (hvd.size() - 1) / 2] * 3


def test_training_where_one_rank_has_no_mpi4py(monkeypatch):
    if hvd.rank() == 1:
        monkeypatch.setitem(sys.modules, "mpi4py", None)
    model, compressor = make_model(), ALQ(bucket_size=512, seed=77, update_steps=[0, 1])
    train(model, distributed(model, compressor), 2)
    assert compressor.table_version == 2
    assert_same_everywhere(flat_parameters(model), "parameters")
