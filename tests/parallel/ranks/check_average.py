"""average() over Horovod."""

from __future__ import annotations

import horovod.torch as hvd
import list_averages
import pytest
import torch

from hvd_adaptive import QSGD, average


@pytest.mark.parametrize("maker", list_averages.MAKERS)
def test_bits_are_simulates(maker):
    list_averages.check_bits(hvd.rank(), hvd.size(), maker)


@pytest.mark.parametrize("label", ["alq-3", "ecdq-3", "eden-2", "signsgd"])
def test_averages_are_around_exact_ones(label):
    list_averages.check_exact(hvd.rank(), hvd.size(), label)


def test_none_counts_as_zeros():
    list_averages.check_none(hvd.rank(), hvd.size())


def test_residuals_of_missing_tensors_are_kept():
    list_averages.check_lost_residuals(hvd.rank(), hvd.size())


@pytest.mark.parametrize("differs", list_averages.DIFFERENT)
def test_lists_that_differ(differs):
    list_averages.check_lists_that_differ(hvd.rank(), differs)


def test_settings_that_differ():
    list_averages.check_settings_that_differ(hvd.rank())


def test_asynchronous_calls():
    list_averages.check_async(hvd.rank(), hvd.size())
    list_averages.check_async_error(hvd.rank())


def test_gradients_are_averaged():
    list_averages.check_backward(hvd.rank(), hvd.size())


def test_a_run_resumes():
    list_averages.check_resumed(hvd.rank())


def test_dtypes():
    list_averages.check_half(hvd.rank(), hvd.size())


def test_process_sets():
    both = hvd.global_process_set if hvd.size() == 2 else hvd.add_process_set([0, 1])
    if hvd.rank() < 2:
        compressor = QSGD(bits=8, norm="linf")
        (result,) = average(list_averages.drawn(hvd.rank(), 0)[:1], compressor, group=both)
        wanted = torch.stack([list_averages.drawn(rank, 0)[0] for rank in (0, 1)]).mean(0)
        assert (result - wanted).norm() < 0.02 * wanted.norm()
    if hvd.size() > 2:
        hvd.remove_process_set(both)
