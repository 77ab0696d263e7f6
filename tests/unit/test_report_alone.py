"""report() of one rank, which exchanges nothing."""

from __future__ import annotations

import logging
import math

import pytest

from hvd_adaptive import QSGD, compressor
from hvd_adaptive.base.errors import WarnOnce


@pytest.fixture(autouse=True)
def anew(monkeypatch):
    monkeypatch.setattr(compressor, "_warn_alone", WarnOnce(compressor.logger))


def test_one_rank_is_explained_once(alone, caplog):
    with caplog.at_level(logging.WARNING, "hvd_adaptive"):
        figures = QSGD(bits=4).report()
        QSGD(bits=4).report()
    assert figures["coordinates"] == 0 and math.isnan(figures["relative_error"])
    (message,) = caplog.messages
    assert "one rank exchanges nothing" in message and "mpirun -np 2" in message


def test_a_report_before_the_first_step_is_silent(caplog):
    QSGD(bits=4).report()
    assert not caplog.messages
