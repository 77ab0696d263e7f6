"""average() over torch.distributed."""

from __future__ import annotations

import list_averages
import pytest
import torch
import torch.distributed as dist
from scheme_cases import EVERY

from hvd_adaptive import QSGD, average
from hvd_adaptive.ddp import CompressionState

RANK, RANKS = dist.get_rank(), dist.get_world_size()


@pytest.mark.parametrize("maker", list_averages.MAKERS)
def check_bits_are_simulates(maker):
    list_averages.check_bits(RANK, RANKS, maker)


@pytest.mark.parametrize("label", EVERY)
def check_averages_are_around_exact_ones(label):
    list_averages.check_exact(RANK, RANKS, label)


def check_none_counts_as_zeros():
    list_averages.check_none(RANK, RANKS)


def check_residuals_of_missing_tensors_are_kept():
    list_averages.check_lost_residuals(RANK, RANKS)


@pytest.mark.parametrize("differs", list_averages.DIFFERENT)
def check_lists_that_differ(differs):
    list_averages.check_lists_that_differ(RANK, differs)


def check_settings_that_differ():
    list_averages.check_settings_that_differ(RANK)


def check_asynchronous_calls():
    list_averages.check_async(RANK, RANKS)


def check_asynchronous_errors():
    list_averages.check_async_error(RANK)


def check_gradients_are_averaged():
    list_averages.check_backward(RANK, RANKS)


def check_a_run_resumes():
    list_averages.check_resumed(RANK)


def check_names():
    list_averages.check_names(RANK)


def check_dtypes():
    list_averages.check_half(RANK, RANKS)


def check_groups():
    """Pairs of ranks average among themselves."""
    pairs = [list(range(first, min(first + 2, RANKS))) for first in range(0, RANKS, 2)]
    groups = [dist.new_group(pair) for pair in pairs]
    pair, group = pairs[RANK // 2], groups[RANK // 2]
    compressor = QSGD(bits=8, norm="linf")
    (result,) = average(list_averages.drawn(RANK, 0)[:1], compressor, group=group)
    wanted = torch.stack([list_averages.drawn(rank, 0)[0] for rank in pair]).mean(0)
    assert (result - wanted).norm() < 0.02 * wanted.norm()
    with pytest.raises(ValueError, match="serves another group"):
        average([result], compressor)
    compressor.close()
    average([result], compressor)


def check_one_compressor_serves_one_caller():
    model = torch.nn.Linear(3, 3)
    compressor = QSGD(bits=4)
    CompressionState(compressor, model.named_parameters())
    with pytest.raises(ValueError, match="already serves an optimizer or a model"):
        average([torch.ones(3)], compressor)
    other = QSGD(bits=4)
    average([torch.ones(3)], other)
    with pytest.raises(ValueError, match="already serves"):
        CompressionState(other, model.named_parameters())
    with pytest.raises(RuntimeError, match="serves average"):
        other.compress(torch.ones(3))
