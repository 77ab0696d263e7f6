"""LocalSGD over torch.distributed: rounds, uneven ends, ranks that differ."""

from __future__ import annotations

import local_rounds
import pytest
import torch
import torch.distributed as dist


@pytest.mark.parametrize("scheme", local_rounds.SCHEMES)
@pytest.mark.parametrize("outer", local_rounds.OUTER)
def check_rounds_are_simulates(scheme, outer):
    local_rounds.check_rounds(dist.get_rank(), dist.get_world_size(), scheme, outer)


@pytest.mark.parametrize("ended", [5, 6])
def check_ranks_may_end_apart(ended):
    local_rounds.check_uneven_ends(dist.get_rank(), dist.get_world_size(), ended)


def check_parameters_become_their_mean():
    local_rounds.check_mean(dist.get_rank(), dist.get_world_size())


@pytest.mark.parametrize("dtype", local_rounds.NARROW, ids=str)
def check_narrow_dtypes_are_averaged_in_float32(dtype):
    local_rounds.check_narrow_dtypes(dist.get_rank(), dist.get_world_size(), dtype)


@pytest.mark.parametrize("differs", local_rounds.TOLD)
def check_ranks_that_differ_are_told(differs):
    local_rounds.check_ranks_that_differ(dist.get_rank(), differs)


def check_a_run_resumes_within_a_round():
    local_rounds.check_resumed_runs(dist.get_rank())


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """All ranks' tensors, by the program's own collective."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.stack(parts)


def check_an_overflow_on_one_rank():
    size = dist.get_world_size()
    local_rounds.check_overflow(dist.get_rank(), size, lambda: int(gather(torch.ones(1)).sum()))


def check_groups_that_change():
    local_rounds.check_changed_groups(dist.get_rank(), dist.get_world_size(), gather)


@pytest.mark.parametrize("act", ["raise", "skip"])
def check_a_rank_that_is_not_finite(act):
    local_rounds.check_not_finite(dist.get_rank(), dist.get_world_size(), act)


def check_ranks_in_different_rounds_are_told():
    local_rounds.check_unequal_counts(dist.get_rank())
