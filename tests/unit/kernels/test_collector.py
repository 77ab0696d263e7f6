"""Garbage collection is postponed within a block, and then goes on as before."""

from __future__ import annotations

import gc

import pytest

from hvd_adaptive.kernels.collector import postponed


def test_nothing_is_collected_within():
    with postponed():
        assert not gc.isenabled()
        with postponed():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_goes_on_after_an_error():
    with pytest.raises(ImportError), postponed():
        raise ImportError
    assert gc.isenabled()


def test_it_stays_off_if_the_program_has_turned_it_off():
    gc.disable()
    try:
        with postponed():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
