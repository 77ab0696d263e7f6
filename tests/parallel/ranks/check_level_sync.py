"""Statistics go to the first rank, and its table comes back to all."""

from __future__ import annotations

import threading

import horovod.torch as hvd
import numpy as np
import pytest

from hvd_adaptive.transport.horovod_world import HorovodWorld
from hvd_adaptive.transport.world import LevelSync

pytestmark = [pytest.mark.ranks, pytest.mark.gloo]


def test_every_rank_gets_what_the_first_makes_of_all():
    sync = LevelSync(HorovodWorld(), "check.sync")
    own = np.array([hvd.rank(), 2.0**-40 * hvd.rank(), -1.0])
    table = sync(own, lambda rows: np.concatenate(rows))
    wanted = [number for rank in range(hvd.size()) for number in (rank, 2.0**-40 * rank, -1.0)]
    assert table.tolist() == wanted


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
