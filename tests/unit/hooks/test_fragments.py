"""Which parameter is in which fragment, and when fragments have rounds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_adaptive.hooks.fragments import Fragments, is_due


def parameters(sizes, frozen=()):
    made = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    for index in frozen:
        made[index].requires_grad_(False)
    return made


@pytest.mark.parametrize(
    ("sizes", "frozen", "number", "found"),
    [
        ([10] * 9, (), 3, [0, 0, 0, 1, 1, 1, 2, 2, 2]),
        ([100, 1, 1, 1], (), 2, [0, 1, 1, 1]),
        ([1, 1, 1, 100], (), 3, [0, 0, 1, 2]),
        ([500, 4, 500, 4], (0, 2), 2, [0, 0, 0, 1]),  # LoRA: frozen ones do not count
    ],
)
def test_fragments_are_equal_parts_in_order(sizes, frozen, number, found):
    made = parameters(sizes, frozen)
    fragments = Fragments(made, number)
    assert [fragments[p] for p in made] == found


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.data())
def test_no_fragment_is_empty(sizes, data):
    number = data.draw(st.integers(1, len(sizes)))
    made = parameters(sizes)
    fragments = Fragments(made, number)
    of = [fragments[p] for p in made]
    assert of == sorted(of) and set(of) == set(range(number))


def test_later_parameters_join_the_smallest_and_have_new_numbers():
    first = parameters([10, 10, 30])
    fragments = Fragments(first, 2)
    later = parameters([5, 40])
    fragments.keep([first[1], first[2], *later])
    assert [fragments[p] for p in later] == [0, 0]  # 10 against 30, then 15 against 30
    numbers = [fragments.name_of(p) for p in (first[1], first[2], *later)]
    assert numbers == list("1234")  # nobody gets another's, whose residuals have its name
    fragments.keep(first[1:2])
    fragments.keep([first[1], *(last := parameters([5]))])
    assert fragments.name_of(last[0]) == "5"
    again = Fragments((), 1)
    again.number = 2
    kept = [first[1], *last]
    loaded = again.loaded(kept, fragments.state_dict(kept))
    assert [loaded[p] for p in kept] == [fragments[p] for p in kept]
    assert [loaded.name_of(p) for p in kept] == ["1", "5"]


@pytest.mark.parametrize("every", [1, 5, 6, 20])
@pytest.mark.parametrize("fragments", [1, 2, 3, 5])
def test_rounds_are_spread_over_a_period(every, fragments):
    if fragments > every:
        return
    due = [step for step in range(1, every + 1) if is_due(step, every, fragments)]
    assert len(due) == fragments and due[-1] == every
    gaps = [b - a for a, b in zip([0, *due], due, strict=False)]
    assert max(gaps) - min(gaps) <= 1 and min(gaps) == every // fragments
