"""The placeholder: tells Average from Sum, and any disagreement of any rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hvd_adaptive import RankMismatchError
from hvd_adaptive.fusion.placeholder import check_reduced, placeholder

TOP = 2**16 - 1  # the largest number sent
# How much of each number is sent: the rest may differ unseen.
SENT = {"slot": 2**16, "step": 2**16, "fingerprint": 2**32}
numbers = st.one_of(
    st.integers(0, 50), st.integers(TOP - 50, TOP), st.integers(2**20 - 50, 2**20 + 50),
    st.integers(2**32 - 50, 2**32 - 1), st.integers(0, 2**32 - 1),
)  # fmt: skip


def all_ranks(size: int, slot=0, step=0, fingerprint=0, odd: dict | None = None) -> np.ndarray:
    """Placeholders of all ranks; ``odd``: {rank: {number: its own value}}."""
    rows = []
    for rank in range(size):
        own = {"slot": slot, "step": step, "fingerprint": fingerprint}
        own |= (odd or {}).get(rank, {})
        rows.append(placeholder(rank, **own).numpy())
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
    tensor = placeholder(3, 2**70, 5, 2**63)
    assert tensor.dtype == torch.float64 and tensor.device.type == "cpu"
    assert tensor.dim() == 1 and tensor.numel() <= 16
    assert tensor.tolist()[:2] == [1, 3] and tensor.tolist()[4:6] == [5, 25]
    for number in (0, 2**16, 2**20 - 1, 2**32 - 1):
        other = placeholder(0, number, number, number)
        assert other.shape == tensor.shape and float(other[:-1].max()) <= TOP**2


@given(st.integers(2, 1000), numbers, numbers, numbers, st.sampled_from(("chain", "tree")))
@example(1000, TOP, TOP, 2**32 - 1, "chain")
@example(997, TOP, TOP, 2**32 - 1, "tree")
@example(1000, 2**20 - 1, 2**20 - 1, 2**20 - 1, "chain")
@example(1, 5, 6, 7, "chain")
def test_sums_and_averages_of_ranks_that_agree_pass(size, slot, step, fingerprint, order):
    rows = all_ranks(size, slot, step, fingerprint)
    assert check_reduced(total(rows, order=order), size) == 1
    assert check_reduced(total(rows, after=1 / size, order=order), size) == 1 / size
    assert check_reduced(total(rows, before=1 / size, order=order), size) == 1 / size


@pytest.mark.parametrize("size", (1, 2, 3, 4, 7, 16, 64, 100, 333, 512, 1000))
@pytest.mark.parametrize("factor", (1.0, 2.0, 3.0, 7.0, 0.1, "size"))
def test_gradient_predivide_factor(size, factor):
    """Horovod scales by 1/f before and by f/size after the sum; both are rounded."""
    factor = float(size) if factor == "size" else factor
    for number in (TOP, TOP - 1, 2**20 // 3, 12345, 1, 0):
        rows = all_ranks(size, number, number, number << 16 | number)
        for order in ("chain", "tree"):
            reduced = total(rows, 1 / factor, factor / size, order)
            assert check_reduced(reduced, size) == 1 / size


@given(
    st.integers(2, 1000), st.data(), numbers, st.sampled_from(("slot", "step", "fingerprint")),
    st.booleans(),
)  # fmt: skip
def test_one_rank_that_disagrees_is_caught(size, data, number, what, average):
    rank = data.draw(st.integers(0, size - 1))
    wrong = data.draw(numbers.filter(lambda n: (n - number) % SENT[what]))
    values = {"slot": 3, "step": 4, "fingerprint": 5, what: number}
    rows = all_ranks(size, **values, odd={rank: {what: wrong}})
    with pytest.raises(RankMismatchError):
        check_reduced(total(rows, after=1 / size if average else 1.0), size)


@pytest.mark.parametrize("size", (2, 3, 4, 5, 8, 1000))
@pytest.mark.parametrize("what", ("slot", "step", "fingerprint"))
@pytest.mark.parametrize("average", (False, True), ids=("sum", "average"))
def test_a_difference_of_one_is_caught(size, what, average):
    """The least there is: neighbouring slots, consecutive steps."""
    for number in (0, 1, 6, 1000, 2**15, TOP - 1, TOP, 2**20 - 1, 2**31 + TOP):
        for rank in {0, 1, size // 2, size - 1}:
            rows = all_ranks(size, **{what: number}, odd={rank: {what: number + 1}})
            with pytest.raises(RankMismatchError):
                check_reduced(total(rows, after=1 / size if average else 1.0), size)


def test_the_topic_is_told_and_settings_come_first():
    for what, said in (("slot", "order"), ("step", "step"), ("fingerprint", "settings")):
        rows = all_ranks(4, 10, 10, 10, odd={2: {what: 15}})
        with pytest.raises(RankMismatchError, match=f"disagree on .*{said}"):
            check_reduced(total(rows), 4)
    rows = all_ranks(4, 10, 10, 10, odd={2: {"slot": 1, "step": 2, "fingerprint": 3}})
    with pytest.raises(RankMismatchError, match="settings"):
        check_reduced(total(rows), 4)


@pytest.mark.parametrize("size", (2, 3, 4, 100))
@pytest.mark.parametrize("reduction", (np.min, np.max, np.prod), ids=("min", "max", "product"))
def test_other_ops_are_refused(size, reduction):
    rows = all_ranks(size, 3, 100, 77_777)
    with pytest.raises(RuntimeError, match=r"Average and op=hvd\.Sum"):
        check_reduced(torch.from_numpy(reduction(rows, axis=0)), size)


def adasum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Maleki et al. 2020, the operator that Horovod applies along a tree."""
    dot = a @ b
    return (1 - dot / (2 * a @ a)) * a + (1 - dot / (2 * b @ b)) * b


@pytest.mark.parametrize("size", (2, 4, 8))
@pytest.mark.parametrize("number", (0, TOP))
def test_adasum_is_refused(size, number):
    rows = list(all_ranks(size, number, number, number))
    while len(rows) > 1:
        rows = [adasum(a, b) for a, b in zip(rows[::2], rows[1::2], strict=True)]
    with pytest.raises(RuntimeError):
        check_reduced(torch.from_numpy(rows[0]), size)


@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf))
@pytest.mark.parametrize("place", range(8))
def test_non_finite_entries_never_pass(bad, place):
    reduced = total(all_ranks(4, 1, 2, 3))
    reduced[place] = bad
    with pytest.raises((RuntimeError, ValueError, OverflowError)):
        check_reduced(reduced, 4)
