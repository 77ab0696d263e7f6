"""Statistics go to the first rank, and its table comes back to all."""

from __future__ import annotations

import logging
import sys
import threading
import time

import horovod.torch as hvd
import numpy as np
import pytest
from conftest import assert_same_everywhere, flat_parameters, make_model, train
from rank_optimizers import distributed

from hvd_adaptive import ALQ
from hvd_adaptive.transport.horovod_world import Abandoned, HorovodWorld, patient
from hvd_adaptive.transport.level_sync import LevelSync
from hvd_adaptive.transport.mpi_messages import mpi_messages


def test_every_rank_gets_what_the_first_makes_of_all():
    sync = LevelSync(HorovodWorld(), "check.sync")
    own = np.array([hvd.rank(), 2.0**-40 * hvd.rank(), -1.0])
    table = sync(own, lambda rows: np.concatenate(rows))
    wanted = [number for rank in range(hvd.size()) for number in (rank, 2.0**-40 * rank, -1.0)]
    assert table.tolist() == wanted


def test_a_fit_that_fails_is_told_on_every_rank():
    def fail(rows):
        raise ZeroDivisionError

    with pytest.raises(RuntimeError, match="the first rank could not fit"):
        LevelSync(HorovodWorld(), "check.sync.fails")(np.zeros(3), fail)


def test_messages_travel_over_mpi_if_horovod_does():
    assert (mpi_messages(HorovodWorld(), "check.sync.mpi") is not None) is bool(hvd.mpi_enabled())


@pytest.mark.parametrize("without", [0, 1])
def test_no_rank_uses_mpi_if_one_cannot(without, monkeypatch, caplog):
    monkeypatch.setattr("hvd_adaptive.transport.mpi_messages._COMMUNICATORS._warned", False)
    if hvd.rank() == without:
        monkeypatch.setitem(sys.modules, "mpi4py", None)
    with caplog.at_level(logging.WARNING, "hvd_adaptive"):
        for number in range(2):
            sync = LevelSync(HorovodWorld(), f"check.sync.without{without}.{number}")
            table = sync(np.full(3, float(hvd.rank())), lambda rows: np.sum(rows, axis=0))
            assert table.tolist() == [hvd.size() * (hvd.size() - 1) / 2] * 3
    if hvd.mpi_enabled():
        own = "mpi4py cannot be imported"
        expected = own if hvd.rank() == without else f"ranks [{without}] cannot use mpi4py"
        assert [expected in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.skipif("not hvd.mpi_enabled()")
def test_what_was_sent_at_a_step_that_was_given_up_is_not_taken_for_the_next():
    """The first rank gives up step 3 before it receives the others' statistics."""
    name, end = "check.sync.given_up", time.monotonic() + 1.0
    if hvd.rank() == 0:
        mpi_messages(HorovodWorld(), f"{name}.mpi")
    else:
        with pytest.raises(Abandoned), patient(lambda: time.monotonic() > end):
            LevelSync(HorovodWorld(), name, 3)(np.full(2, 99.0), lambda rows: np.sum(rows, axis=0))
    hvd.barrier()
    table = LevelSync(HorovodWorld(), name, 4)(np.ones(2), lambda rows: np.sum(rows, axis=0))
    assert table.tolist() == [hvd.size()] * 2


def test_ranks_may_sync_in_different_orders():
    """Each in a thread of its own, as steps that wait for each other are."""
    tables: dict[int, np.ndarray] = {}

    def sync(number: int) -> None:
        own = np.arange(number, 200_000.0) + hvd.rank()
        fit = lambda rows: np.sum(rows, axis=0)[: 1000 + number]  # noqa: E731
        tables[number] = LevelSync(HorovodWorld(), f"check.sync.orders{number}")(own, fit)

    numbers = list(range(6))
    order = numbers if hvd.rank() % 2 else numbers[::-1]
    threads = [threading.Thread(target=sync, args=(number,), daemon=True) for number in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    ranks = hvd.size() * (hvd.size() - 1) / 2
    for number in numbers:
        wanted = hvd.size() * np.arange(number, number + 1000.0 + number) + ranks
        assert np.array_equal(tables[number], wanted)


def test_training_where_one_rank_has_no_mpi4py(monkeypatch):
    if hvd.rank() == 1:
        monkeypatch.setitem(sys.modules, "mpi4py", None)
    model, compressor = make_model(), ALQ(bucket_size=512, seed=77, update_steps=[0, 1])
    train(model, distributed(model, compressor), 2)
    assert compressor.codec.table_version == 2
    assert_same_everywhere(flat_parameters(model), "parameters")
