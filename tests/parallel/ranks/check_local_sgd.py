"""LocalSGD over Horovod: rounds, uneven ends, ranks that differ."""

from __future__ import annotations

import changed_groups
import fragment_rounds
import horovod.torch as hvd
import local_rounds
import pytest
import torch


@pytest.mark.parametrize("scheme", local_rounds.SCHEMES)
@pytest.mark.parametrize("outer", local_rounds.OUTER)
def test_rounds_are_simulates(scheme, outer):
    local_rounds.check_rounds(hvd.rank(), hvd.size(), scheme, outer)


@pytest.mark.parametrize("ended", [5, 6])
def test_ranks_may_end_apart(ended):
    local_rounds.check_uneven_ends(hvd.rank(), hvd.size(), ended)


def test_parameters_become_their_mean():
    local_rounds.check_mean(hvd.rank(), hvd.size())


@pytest.mark.parametrize("dtype", local_rounds.NARROW, ids=str)
def test_narrow_dtypes_are_averaged_in_float32(dtype):
    local_rounds.check_narrow_dtypes(hvd.rank(), hvd.size(), dtype)


@pytest.mark.parametrize("differs", local_rounds.TOLD)
def test_ranks_that_differ_are_told(differs):
    local_rounds.check_ranks_that_differ(hvd.rank(), differs)


def test_a_run_resumes_within_a_round():
    local_rounds.check_resumed_runs(hvd.rank())


@pytest.mark.parametrize("rounds", [local_rounds, fragment_rounds])
def test_an_overflow_on_one_rank(rounds):
    def collective() -> int:
        return len(hvd.allgather(torch.ones(1), name="own"))

    rounds.check_overflow(hvd.rank(), hvd.size(), collective)


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """All ranks' tensors."""
    return hvd.allgather(tensor[None].contiguous(), name="gathered")


def test_groups_that_change():
    changed_groups.check_changed_groups(hvd.rank(), hvd.size(), gather)


def test_a_parameter_that_is_replaced():
    changed_groups.check_replaced_parameter(hvd.rank(), hvd.size(), gather)


@pytest.mark.parametrize("act", changed_groups.CHANGED)
def test_groups_that_one_rank_changes(act):
    changed_groups.check_groups_that_differ(hvd.rank(), act)


@pytest.mark.parametrize("act", ["raise", "skip"])
def test_a_rank_that_is_not_finite(act):
    local_rounds.check_not_finite(hvd.rank(), hvd.size(), act)


def test_ranks_none_of_which_is_finite():
    local_rounds.check_none_is_finite(hvd.rank())


def test_ranks_in_different_rounds_are_told():
    local_rounds.check_unequal_counts(hvd.rank())


def test_process_sets_train_by_themselves():
    """Even and odd ranks; with two ranks each is alone, and exchanges nothing."""
    size = hvd.size()
    sets = [hvd.add_process_set(list(range(first, size, 2))) for first in (0, 1)]
    mine = sets[hvd.rank() % 2]
    make = local_rounds.SCHEMES["alq"] if mine.size() > 1 else None
    optimizer, net, mirror = local_rounds.train_beside_mirror(
        mine.rank(), [6] * mine.size(), make, 3, mine, momentum=0.5
    )
    local_rounds.assert_equal(net, mirror.nets[0])
    assert optimizer.rounds == 2
    hvd.barrier()
    for one in sets:
        hvd.remove_process_set(one)


@pytest.mark.parametrize("case", fragment_rounds.CASES)
def test_fragments_are_those_of_a_plain_simulation(case):
    fragment_rounds.check_simulation(hvd.rank(), [14] * hvd.size(), case)


@pytest.mark.parametrize("case", ["in turn", "delayed", "until the next"])
@pytest.mark.parametrize("first", [5, 13])
def test_ranks_may_end_apart_in_fragments(case, first):
    """One rank takes other numbers of steps; another skips one."""
    counts = [first, *[10] * (hvd.size() - 1)]
    fragment_rounds.check_simulation(hvd.rank(), counts, case, frozenset({(1, 4)}))


@pytest.mark.parametrize("scheme", fragment_rounds.COMPRESSED)
def test_compressed_fragments_are_simulates(scheme):
    fragment_rounds.check_compressed_simulation(hvd.rank(), hvd.size(), scheme)


def test_fragments_are_compressed(caplog):
    fragment_rounds.check_compressed(hvd.rank(), gather, caplog)


@pytest.mark.parametrize("saved_at", [2, 4, 7])
def test_a_run_resumes_with_a_round_in_flight(saved_at):
    fragment_rounds.check_resumed_runs(hvd.rank(), saved_at)


@pytest.mark.parametrize("act", ["raise", "skip"])
def test_a_fragment_that_is_not_finite(act):
    fragment_rounds.check_not_finite(hvd.rank(), hvd.size(), act)


def test_frozen_fragments():
    fragment_rounds.check_frozen_fragments(hvd.rank(), gather)


@pytest.mark.parametrize("frozen_after", [2, 3])
def test_a_layer_frozen_while_rounds_are_delayed(frozen_after):
    fragment_rounds.check_frozen_while_delayed(hvd.rank(), gather, frozen_after)


def test_a_delayed_round_does_not_wait():
    def meet() -> None:
        hvd.allreduce(torch.ones(1), name="meet")

    fragment_rounds.check_background(hvd.rank(), hvd.size(), meet, meet)


def test_ranks_that_differ_in_the_delay_are_told():
    fragment_rounds.check_ranks_that_differ(hvd.rank())


def test_settings_change_with_a_round_in_flight():
    fragment_rounds.check_changed_settings(hvd.rank(), hvd.size())
