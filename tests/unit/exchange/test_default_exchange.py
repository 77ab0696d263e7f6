"""The exchange without ``exchange=``: by the number of ranks alone."""

from __future__ import annotations

import pytest

from hvd_adaptive import ALQ
from hvd_adaptive.exchange.auto import EXCHANGES, name_of_exchange


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [(1, "allgather"), (3, "allgather"), (4, "scatter_reduce"), (1000, "scatter_reduce")],
)
def test_the_number_of_ranks_decides(ranks, expected):
    assert name_of_exchange(ALQ().settings, ranks) == expected


@pytest.mark.parametrize("name", EXCHANGES)
def test_a_given_exchange_is_kept(name):
    assert all(name_of_exchange(ALQ(exchange=name).settings, n) == name for n in (2, 64))


def test_the_report_names_it():
    assert ALQ().report()["exchange"] is None
    assert ALQ(exchange="auto").report()["exchange"] == "auto"
