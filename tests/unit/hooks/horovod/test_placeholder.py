"""The sum of positions tells Average from Sum, and any disagreement of any rank."""

from __future__ import annotations

import operator
import re

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hvd_adaptive import RankMismatchError
from hvd_adaptive.hooks.horovod.placeholder import (
    Placeholders,
    Reduction,
    check_reduced,
    disagreement,
    position,
)
from hvd_adaptive.transport.horovod_world import reference

TOP = 2**16 - 1  # the largest number sent
# How many bits of each number are sent: the others may differ unseen.
BITS = {"slot": 16, "step": 16, "fingerprint": 32}
numbers = st.one_of(
    st.integers(0, 50),
    st.integers(TOP - 50, TOP),
    st.integers(2**20 - 50, 2**20 + 50),
    st.integers(2**32 - 50, 2**32 - 1),
    st.integers(0, 2**32 - 1),
)


def all_ranks(size: int, slot=0, step=0, fingerprint=0, odd: dict | None = None) -> np.ndarray:
    """Positions of all ranks; ``odd``: {rank: {number: its own value}}."""
    rows = []
    for rank in range(size):
        own = {"slot": slot, "step": step, "fingerprint": fingerprint}
        own |= (odd or {}).get(rank, {})
        rows.append(position(rank, **own).numpy())
    return np.array(rows)


def total(rows: np.ndarray, before: float = 1.0, after: float = 1.0, order: str = "chain"):
    """A reduction with Horovod's pre- and postscale, as a chain or a tree of float64 sums."""
    rows = rows * before
    if order == "chain":
        result = rows[0].copy()
        for row in rows[1:]:
            result += row
    else:
        while len(rows) > 1:
            rest = rows[2 * (len(rows) // 2) :]
            rows = np.concatenate([rows[0:-1:2][: len(rows) // 2] + rows[1::2], rest])
        result = rows[0]
    return torch.from_numpy(result * after)


def read(rows: np.ndarray, size: int, before=1.0, after=1.0, order="chain") -> Reduction:
    """What ranks read in a reduction; in a sum, each also if it knows that it is one."""
    reduced = total(rows, before, after, order)
    if before == after == 1.0:
        own = torch.from_numpy(rows[rows[:, 0] > 0][-1])
        assert check_reduced(reduced, size, own=own) == check_reduced(reduced, size)
    return check_reduced(reduced, size)


def test_numbers_of_any_size_are_few_and_small():
    for number in (0, 2**16, 2**20 - 1, 2**32 - 1, 2**70):
        tensor = position(0, number, number, number)
        assert tensor.dtype == torch.float64 and tensor.shape == (19,)
        assert float(tensor[:-1].max()) <= TOP**2


@given(st.integers(1, 1000), numbers, numbers, numbers, st.sampled_from(("chain", "tree")))
@example(1000, TOP, TOP, 2**32 - 1, "chain")
@example(997, TOP, TOP, 2**32 - 1, "tree")
@example(1000, 2**20 - 1, 2**20 - 1, 2**20 - 1, "chain")
@example(1, 5, 6, 7, "chain")
def test_sums_and_averages_of_ranks_that_agree_pass(size, slot, step, fingerprint, order):
    """Horovod divides by f before and by size/f after the sum (gradient_predivide_factor)."""
    rows = all_ranks(size, slot, step, fingerprint)
    assert read(rows, size, order=order) == Reduction(1, size)
    for factor in (1.0, 3.0, 7.0, 0.1, float(size)):
        assert read(rows, size, 1 / factor, factor / size, order) == Reduction(1 / size, size)


@pytest.mark.parametrize("size", (2, 3, 1000))
@pytest.mark.parametrize("what", ("slot", "step", "fingerprint"))
def test_a_difference_of_one_is_caught(size, what):
    """The least there is: neighbouring slots, consecutive steps; and one bit of a fingerprint."""
    pairs = [(n, n + 1) for n in (0, 1000, TOP - 1, TOP, 2**20 - 1, 2**31 + TOP)]
    pairs += [(0, 1 << bit) for bit in range(BITS[what])]
    for number, other in pairs:
        for rank in {0, 1, size - 1}:
            rows = all_ranks(size, **{what: number}, odd={rank: {what: other}})
            for factor in (1.0, 1 / size):
                with pytest.raises(RankMismatchError):
                    read(rows, size, after=factor)


@pytest.mark.parametrize(
    ("odd", "topic"),
    [
        ({"slot": 15}, "order"),
        ({"step": 15}, "step"),
        ({"fingerprint": 15}, "settings"),
        ({"slot": 1, "step": 2, "fingerprint": 3}, "settings"),
    ],
)
def test_a_mismatch_has_a_topic_and_settings_come_first(odd, topic):
    with pytest.raises(RankMismatchError, match=f"disagree on .*{topic}"):
        read(all_ranks(4, 10, 10, 10, odd={2: odd}), 4)


def adasum(rows: np.ndarray) -> np.ndarray:
    """Maleki et al. 2020, the operator that Horovod applies along a tree."""
    rows = list(rows)
    while len(rows) > 1:
        pairs = zip(rows[::2], rows[1::2], strict=True)
        rows = [(1 - a @ b / (2 * a @ a)) * a + (1 - a @ b / (2 * b @ b)) * b for a, b in pairs]
    return rows[0]


OTHER_OPS = {
    "op=hvd.Min: must be hvd.Average or hvd.Sum": lambda rows: rows.min(0),
    "op=hvd.Max: must be hvd.Average or hvd.Sum": lambda rows: rows.max(0),
    "op=hvd.Product: must be hvd.Average or hvd.Sum": lambda rows: rows.prod(0),
    "Adasum": adasum,
}


@pytest.mark.parametrize("size", (2, 4, 8, 64))
@pytest.mark.parametrize("told", OTHER_OPS)
def test_other_ops_are_refused_by_name(size, told):
    for numbers in ((1, 1, 1), (3, 100, 77_777), (TOP, TOP, TOP)):
        with np.errstate(over="ignore"):
            reduced = OTHER_OPS[told](all_ranks(size, *numbers))
        with pytest.raises(ValueError, match=re.escape(told)):
            check_reduced(torch.from_numpy(reduced), size)
    for bad in (np.nan, np.inf, -np.inf):
        for place in range(8):
            reduced = total(all_ranks(size, 1, 2, 3))
            reduced[place] = bad
            with pytest.raises(ValueError, match=r"must be hvd\.Average"):
                check_reduced(reduced, size)


@given(st.integers(1, 200), st.data(), numbers, st.booleans())
def test_ranks_that_have_joined_are_counted(size, data, number, average):
    """A rank in hvd.join() adds zeros."""
    active = data.draw(st.sets(st.integers(0, size - 1), min_size=1))
    rows = all_ranks(size, number, number, number)
    rows[[rank for rank in range(size) if rank not in active]] = 0
    factor = 1 / size if average else 1.0
    assert read(rows, size, after=factor) == Reduction(factor, len(active))
    rank = data.draw(st.sampled_from(sorted(active)))
    if len(active) > 1:
        rows[rank] = all_ranks(size, number + 1, number, number)[rank]
        with pytest.raises(RankMismatchError, match="order"):
            read(rows, size, after=factor)


@given(st.integers(2, 1000), st.integers(-1000, 2000), st.booleans())
def test_another_factor_is_not_taken_for_fewer_ranks(size, times, average):
    """hvd.allreduce's prescale_factor and postscale_factor: times/size, and so on."""
    rows = all_ranks(size, 3, 100, 77_777)
    same = {1.0, float(size) if average else 1 / size}  # an average times size is a sum
    for scale in {times / size, times / 8, float(times)} - same:
        with pytest.raises(ValueError, match="without other factors"):
            check_reduced(total(rows, after=scale * (1 / size if average else 1.0)), size)


@pytest.mark.parametrize("factor", (1.0, 0.25))
@pytest.mark.parametrize("ranks", ((), (2,), (0, 1, 2, 3)), ids=str)
def test_groups_may_differ_and_any_rank_may_want_a_comparison(factor, ranks):
    """Neither is a disagreement: ranks cut groups by name, and all of them compare parameters."""
    groups = [
        position(rank, 2, 3, 4, groups=7 + (rank == 1), compares=rank in ranks).numpy()
        for rank in range(4)
    ]
    expected = Reduction(factor, 4, same_groups=False, compares=bool(ranks))
    assert read(np.array(groups), 4, after=factor) == expected
    assert disagreement(total(np.array(groups), after=factor), 4) is None


def test_each_step_begins_with_zeros():
    """Whatever Horovod and the step before have left in them, in the same tensors, which are no
    views: a reference to a view is one to the tensor that it is a view of."""
    placeholders = Placeholders(300)
    tensors = list(placeholders.tensors)
    for _ in range(3):
        placeholders.begin()
        for slot in (4, 299):
            placeholders.mark_absent(slot)
        assert all(map(operator.is_, placeholders.tensors, tensors))
        assert [float(tensor) for tensor in tensors] == [slot in (4, 299) for slot in range(300)]
        for tensor in tensors:
            assert tensor.dtype == torch.float64 and tensor.shape == (1,) and tensor._base is None
            tensor.add_(3.0)


def test_a_reference_does_not_depend_on_the_shape():
    """Horovod's thread gives an output its size at any time, also while it is referred to."""
    for shape in ((), (0,), (3, 4)):
        tensor = torch.zeros(shape)
        held = reference(tensor)
        assert held._base is tensor and held.shape == (0,)
        assert tensor.resize_(7).shape == (7,)
