"""The sum of positions tells Average from Sum, and any disagreement of any rank."""

from __future__ import annotations

import gc

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
from hvd_adaptive.transport.horovod_world import References, reference

TOP = 2**16 - 1  # the largest number sent
# How much of each number is sent: the rest may differ unseen.
SENT = {"slot": 2**16, "step": 2**16, "fingerprint": 2**32}
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


def test_shape_is_small_and_on_the_cpu():
    tensor = position(3, 2**70, 5, 2**63)
    assert tensor.dtype == torch.float64 and tensor.device.type == "cpu"
    assert tensor.dim() == 1 and tensor.numel() <= 17
    assert tensor.tolist()[:3] == [1, 3, 0] and tensor.tolist()[5:7] == [5, 25]
    for number in (0, 2**16, 2**20 - 1, 2**32 - 1):
        other = position(0, number, number, number)
        assert other.shape == tensor.shape and float(other[:-1].max()) <= TOP**2


@given(st.integers(2, 1000), numbers, numbers, numbers, st.sampled_from(("chain", "tree")))
@example(1000, TOP, TOP, 2**32 - 1, "chain")
@example(997, TOP, TOP, 2**32 - 1, "tree")
@example(1000, 2**20 - 1, 2**20 - 1, 2**20 - 1, "chain")
@example(1, 5, 6, 7, "chain")
def test_sums_and_averages_of_ranks_that_agree_pass(size, slot, step, fingerprint, order):
    rows = all_ranks(size, slot, step, fingerprint)
    assert check_reduced(total(rows, order=order), size) == Reduction(1, size)
    for scaled in ({"after": 1 / size}, {"before": 1 / size}):
        found = check_reduced(total(rows, order=order, **scaled), size)
        assert found == Reduction(1 / size, size)


@given(st.integers(1, 1000), numbers, numbers, st.data())
def test_check_reduced_reads_the_same_if_it_knows_its_own_position(size, step, fingerprint, data):
    """A sum of all ranks' positions, of some ranks', and one in which a rank differs."""
    rows = all_ranks(size, 0, step, fingerprint)
    rank, own = data.draw(st.integers(0, size - 1)), torch.from_numpy(rows[-1].copy())
    rows[rank, -2] = float(data.draw(st.booleans()))
    everyone = total(rows)
    assert check_reduced(everyone, size, own=own) == check_reduced(everyone, size)
    what = data.draw(st.sampled_from(("step", "fingerprint", "groups", "joined")))
    if size > 1 and what == "joined":
        rows[rank] = 0
        assert check_reduced(total(rows), size, own=own).active == size - 1
    elif size > 1:
        given_ = {"slot": 0, "step": step, "fingerprint": fingerprint, "groups": 0}
        rows[rank] = position(rank, **given_ | {what: given_.get(what, 0) + 1}).numpy()
        if what == "groups":
            assert not check_reduced(total(rows), size, own=own).same_groups
        else:
            with pytest.raises(RankMismatchError):
                check_reduced(total(rows), size, own=own)


@pytest.mark.parametrize("size", (1, 2, 3, 7, 64, 333, 1000))
def test_gradient_predivide_factor(size):
    """Horovod scales by 1/f before and by f/size after the sum; both are rounded."""
    for number in (TOP, 2**20 // 3, 12345, 0):
        rows = all_ranks(size, number, number, number << 16 | number)
        for factor in (1.0, 3.0, 7.0, 0.1, float(size)):
            for order in ("chain", "tree"):
                reduced = total(rows, 1 / factor, factor / size, order)
                assert check_reduced(reduced, size) == Reduction(1 / size, size)


@given(
    st.integers(2, 1000),
    st.data(),
    numbers,
    st.sampled_from(("slot", "step", "fingerprint")),
    st.booleans(),
)
def test_one_rank_that_disagrees_is_caught(size, data, number, what, average):
    rank = data.draw(st.integers(0, size - 1))
    wrong = data.draw(numbers.filter(lambda n: (n - number) % SENT[what]))
    values = {"slot": 3, "step": 4, "fingerprint": 5, what: number}
    rows = all_ranks(size, **values, odd={rank: {what: wrong}})
    with pytest.raises(RankMismatchError):
        check_reduced(total(rows, after=1 / size if average else 1.0), size)


@pytest.mark.parametrize("size", (2, 3, 1000))
@pytest.mark.parametrize("what", ("slot", "step", "fingerprint"))
def test_a_difference_of_one_is_caught(size, what):
    """The least there is: neighbouring slots, consecutive steps; and one bit of a fingerprint."""
    pairs = [(n, n + 1) for n in (0, 1000, TOP - 1, TOP, 2**20 - 1, 2**31 + TOP)]
    pairs += [(0, SENT[what] >> bit) for bit in range(1, SENT[what].bit_length())]
    for number, other in pairs:
        for rank in {0, 1, size - 1}:
            rows = all_ranks(size, **{what: number}, odd={rank: {what: other}})
            for factor in (1.0, 1 / size):
                with pytest.raises(RankMismatchError):
                    check_reduced(total(rows, after=factor), size)


def test_the_topic_is_told_and_settings_come_first():
    for what, said in (("slot", "order"), ("step", "step"), ("fingerprint", "settings")):
        rows = all_ranks(4, 10, 10, 10, odd={2: {what: 15}})
        with pytest.raises(RankMismatchError, match=f"disagree on .*{said}"):
            check_reduced(total(rows), 4)
    rows = all_ranks(4, 10, 10, 10, odd={2: {"slot": 1, "step": 2, "fingerprint": 3}})
    with pytest.raises(RankMismatchError, match="settings"):
        check_reduced(total(rows), 4)


@pytest.mark.parametrize("size", (2, 3, 4, 100))
@pytest.mark.parametrize("op", ("Min", "Max", "Product"))
def test_other_ops_are_refused_by_name(size, op):
    rows = all_ranks(size, 3, 100, 77_777)
    reduction = {"Min": np.min, "Max": np.max, "Product": np.prod}[op]
    with np.errstate(over="ignore"):
        reduced = reduction(rows, axis=0)
    with pytest.raises(ValueError, match=rf"op=hvd\.{op}: must be hvd\.Average or hvd\.Sum"):
        check_reduced(torch.from_numpy(reduced), size)


@given(st.integers(1, 200), st.data(), numbers, st.booleans())
def test_ranks_that_have_joined_are_counted(size, data, number, average):
    """A rank in hvd.join() adds zeros."""
    active = data.draw(st.sets(st.integers(0, size - 1), min_size=1))
    rows = all_ranks(size, number, number, number)
    rows[[rank for rank in range(size) if rank not in active]] = 0
    factor = 1 / size if average else 1.0
    assert check_reduced(total(rows, after=factor), size) == Reduction(factor, len(active))
    rank = data.draw(st.sampled_from(sorted(active)))
    if len(active) > 1:
        rows[rank] = all_ranks(size, number + 1, number, number)[rank]
        with pytest.raises(RankMismatchError, match="order"):
            check_reduced(total(rows, after=factor), size)


@given(st.integers(2, 1000), st.integers(-1000, 2000), st.booleans())
def test_another_factor_is_not_taken_for_fewer_ranks(size, times, average):
    """hvd.allreduce's prescale_factor and postscale_factor: times/size, and so on."""
    rows = all_ranks(size, 3, 100, 77_777)
    same = {1.0, float(size) if average else 1 / size}  # an average times size is a sum
    for scale in {times / size, times / 8, float(times)} - same:
        with pytest.raises(ValueError, match="without other factors"):
            check_reduced(total(rows, after=scale * (1 / size if average else 1.0)), size)


def adasum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Maleki et al. 2020, the operator that Horovod applies along a tree."""
    dot = a @ b
    return (1 - dot / (2 * a @ a)) * a + (1 - dot / (2 * b @ b)) * b


@pytest.mark.parametrize("size", (2, 4, 8, 16, 64))
@pytest.mark.parametrize("number", (0, 1, TOP))
def test_adasum_is_refused(size, number):
    rows = list(all_ranks(size, number, number, number))
    while len(rows) > 1:
        rows = [adasum(a, b) for a, b in zip(rows[::2], rows[1::2], strict=True)]
    with pytest.raises(ValueError, match="Adasum"):
        check_reduced(torch.from_numpy(rows[0]), size)


@pytest.mark.many
@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf))
@pytest.mark.parametrize("place", range(8))
def test_non_finite_entries_never_pass(bad, place):
    reduced = total(all_ranks(4, 1, 2, 3))
    reduced[place] = bad
    with pytest.raises(ValueError, match=r"must be hvd\.Average"):
        check_reduced(reduced, 4)


@pytest.mark.parametrize("factor", (1.0, 0.25))
@pytest.mark.parametrize("ranks", ((), (2,), (0, 1, 2, 3)), ids=str)
def test_groups_may_differ_and_any_rank_may_want_a_comparison(factor, ranks):
    """Neither is a disagreement: ranks cut groups by name, and all of them compare parameters."""
    groups = [
        position(rank, 2, 3, 4, groups=7 + (rank == 1), compares=rank in ranks).numpy()
        for rank in range(4)
    ]
    reduced = total(np.array(groups), after=factor)
    expected = Reduction(factor, 4, same_groups=False, compares=bool(ranks))
    assert check_reduced(reduced, 4) == expected
    assert disagreement(reduced, 4) is None


def test_each_step_begins_with_zeros():
    """Whatever Horovod and the step before have left in them, in the same tensors."""
    placeholders = Placeholders(300)
    places = None
    for _ in range(3):
        placeholders.begin()
        for slot in (4, 299):
            placeholders.mark_absent(slot)
        tensors = placeholders.tensors
        assert [float(tensor) for tensor in tensors] == [slot in (4, 299) for slot in range(300)]
        assert {(tensor.dtype, tensor.shape) for tensor in tensors} == {(torch.float64, (1,))}
        for tensor in tensors:
            tensor.add_(3.0)
        assert places in (None, [id(tensor) for tensor in tensors])
        places = [id(tensor) for tensor in tensors]


def test_a_step_creates_no_objects():
    placeholders = Placeholders(500)
    placeholders.begin()
    before = len(gc.get_objects())
    placeholders.begin()
    kept = [placeholders.tensors[slot] for slot in range(500)]
    assert len(gc.get_objects()) - before < 10 and len(kept) == 500


def test_references_end_with_their_collective_or_generation():
    """A collective that fails keeps its tensors until Horovod has started anew."""
    in_flight, tensors = References(), [torch.zeros(2) for _ in range(4)]
    generation = {1: (tensors[0], tensors[1]), 2: (tensors[2], None, (tensors[3],))}
    for handle in generation:
        in_flight.add(generation, handle)
    held = in_flight[2]
    assert [view._base is t for view, t in zip(held, tensors[2:], strict=True)] == [True, True]
    in_flight.pop(1)
    assert len(in_flight) == 1
    in_flight.add({5: (tensors[0], tensors[0])}, 5)
    assert list(in_flight) == [5]


@pytest.mark.parametrize("shape", [(), (0,), (3, 4)])
def test_a_reference_does_not_depend_on_the_shape(shape):
    """Horovod's thread gives an output its size at any time, also while it is referred to."""
    tensor = torch.zeros(shape)
    held = reference(tensor)
    assert held._base is tensor and held.shape == (0,)
    assert tensor.resize_(7).shape == (7,)


def test_a_placeholder_is_no_view():
    """A reference to a view is one to the tensor that it is a view of."""
    placeholders = Placeholders(3)
    for slot, tensor in enumerate(placeholders.tensors):
        assert tensor._base is None and placeholders._references[slot]._base is tensor
