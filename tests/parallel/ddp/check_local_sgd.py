"""LocalSGD over torch.distributed: rounds, uneven ends, ranks that differ."""

from __future__ import annotations

import changed_groups
import fragment_rounds
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


def check_an_overflow_on_one_rank_in_fragments():
    size = dist.get_world_size()
    fragment_rounds.check_overflow(dist.get_rank(), size, lambda: int(gather(torch.ones(1)).sum()))


def check_groups_that_change():
    changed_groups.check_changed_groups(dist.get_rank(), dist.get_world_size(), gather)


def check_a_parameter_that_is_replaced():
    changed_groups.check_replaced_parameter(dist.get_rank(), dist.get_world_size(), gather)


@pytest.mark.parametrize("act", changed_groups.CHANGED)
def check_groups_that_one_rank_changes(act):
    changed_groups.check_groups_that_differ(dist.get_rank(), act)


@pytest.mark.parametrize("act", ["raise", "skip"])
def check_a_rank_that_is_not_finite(act):
    local_rounds.check_not_finite(dist.get_rank(), dist.get_world_size(), act)


def check_ranks_none_of_which_is_finite():
    local_rounds.check_none_is_finite(dist.get_rank())


def check_ranks_in_different_rounds_are_told():
    local_rounds.check_unequal_counts(dist.get_rank())


@pytest.mark.parametrize("case", fragment_rounds.CASES)
def check_fragments_are_those_of_a_plain_simulation(case):
    fragment_rounds.check_simulation(dist.get_rank(), [14] * dist.get_world_size(), case)


@pytest.mark.parametrize("case", ["in turn", "delayed", "until the next"])
@pytest.mark.parametrize("first", [5, 13])
def check_ranks_may_end_apart_in_fragments(case, first):
    """One rank takes other numbers of steps; another skips one."""
    counts = [first, *[10] * (dist.get_world_size() - 1)]
    fragment_rounds.check_simulation(dist.get_rank(), counts, case, frozenset({(1, 4)}))


@pytest.mark.parametrize("scheme", fragment_rounds.COMPRESSED)
def check_compressed_fragments_are_simulates(scheme):
    fragment_rounds.check_compressed_simulation(dist.get_rank(), dist.get_world_size(), scheme)


def check_fragments_are_compressed(caplog):
    fragment_rounds.check_compressed(dist.get_rank(), gather, caplog)


@pytest.mark.parametrize("saved_at", [2, 4, 7])
def check_a_run_resumes_with_a_round_in_flight(saved_at):
    fragment_rounds.check_resumed_runs(dist.get_rank(), saved_at)


@pytest.mark.parametrize("act", ["raise", "skip"])
def check_a_fragment_that_is_not_finite(act):
    fragment_rounds.check_not_finite(dist.get_rank(), dist.get_world_size(), act)


def check_frozen_fragments():
    fragment_rounds.check_frozen_fragments(dist.get_rank(), gather)


@pytest.mark.parametrize("frozen_after", [2, 3])
def check_a_layer_frozen_while_rounds_are_delayed(frozen_after):
    fragment_rounds.check_frozen_while_delayed(dist.get_rank(), gather, frozen_after)


def check_a_delayed_round_does_not_wait():
    def go() -> None:
        for other in range(1, dist.get_world_size()):
            dist.send(torch.ones(1), other)

    size = dist.get_world_size()
    fragment_rounds.check_background(dist.get_rank(), size, lambda: dist.recv(torch.ones(1), 0), go)


def check_ranks_that_differ_in_the_delay_are_told():
    fragment_rounds.check_ranks_that_differ(dist.get_rank())


def check_settings_change_with_a_round_in_flight():
    fragment_rounds.check_changed_settings(dist.get_rank(), dist.get_world_size())
