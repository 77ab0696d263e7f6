"""When tables are refitted."""

from __future__ import annotations

import copy
import itertools
import pickle
from types import SimpleNamespace

import numpy as np
import pytest

from hvd_adaptive.adapt.schedule import UpdateSchedule
from hvd_adaptive.adapt.updates import Due, Updates


def due(schedule: UpdateSchedule, until: int) -> list[int]:
    return [step for step in range(until) if schedule.is_due(step)]


def test_default_is_the_papers_and_three_early_steps():
    schedule = UpdateSchedule()
    papers = [100, 2000, 10_000, 20_000, 30_000, 40_000, 50_000]
    assert due(schedule, 50_001) == [0, 1, 7, *papers]


def test_collections_and_iterables():
    kinds = (list, set, tuple, iter, frozenset, np.array, dict.fromkeys)
    for make in (*kinds, lambda steps: (step for step in steps)):
        schedule = UpdateSchedule(make([3, 7, 20]))
        assert due(schedule, 50) == due(schedule, 50) == [3, 7, 20]
        assert due(schedule, 10) == [3, 7], "it may go back"
    assert due(UpdateSchedule([20, 3, 7, 3]), 50) == [3, 7, 20], "in any order, repeats are one"
    for steps in ([], iter(()), lambda step: False):
        assert due(UpdateSchedule(steps), 100) == []
    assert due(UpdateSchedule(lambda step: step % 4 == 1), 10) == [1, 5, 9]
    assert due(UpdateSchedule(lambda step: np.bool_(step == 2)), 5) == [2]


def test_endless_iterables_are_read_only_as_far_as_needed():
    taken = []

    def endless():
        for step in itertools.count(5, 10):
            taken.append(step)
            yield step

    schedule = UpdateSchedule(endless())
    assert due(schedule, 30) == [5, 15, 25]
    assert taken[-1] <= 35
    assert due(UpdateSchedule(itertools.count(0, 1000)), 2001) == [0, 1000, 2000]
    assert due(UpdateSchedule(range(0, 10**12, 4)), 9) == [0, 4, 8]


def test_copies_are_asked_apart_but_read_one_iterable():
    """Generators cannot be copied; a compressor with one can."""
    schedule = UpdateSchedule(step for step in (3, 7, 20))
    assert due(schedule, 5) == [3]
    other = copy.deepcopy(schedule)
    schedule.request(9)
    assert due(other, 50) == [3, 7, 20] and due(schedule, 50) == [3, 7, 9, 20]
    assert due(pickle.loads(pickle.dumps(UpdateSchedule())), 2001) == [0, 1, 7, 100, 2000]


def test_wrong_steps_of_an_iterator_are_told_when_they_are_read():
    for steps in ([7, 3], [5, -1], [0, 2.5], [0, "a"], [0, True], [0, None]):
        with pytest.raises(ValueError, match="update_steps"):
            due(UpdateSchedule(iter(steps)), 30)


def test_success_resets_the_waiting():
    schedule = UpdateSchedule([0, 2, 100])
    for step in (0, 1, 2):
        assert schedule.is_due(step), "planned steps are due during retries, too"
        schedule.done(step, complete=False)
    assert schedule.is_due(3)
    schedule.done(3, complete=True)
    assert due(schedule, 200) == [0, 2, 100]
    schedule.done(100, complete=False)
    assert schedule.is_due(101) and not schedule.is_due(104)


def test_incomplete_updates_are_retried_after_1_2_4_8_steps_until_one_is_complete():
    """A planned update begins a new row, however long an earlier row of failures had become."""
    schedule = UpdateSchedule([5, 1005])
    failed = [s for s in range(1005) if schedule.is_due(s) and not schedule.done(s, False)]
    assert failed == [5, *(5 + 2**k - 1 for k in range(1, 10))]
    schedule.done(1005, False)
    assert due(schedule, 1014)[1:] == [1005, 1006]
    schedule.done(1006, True)
    assert due(schedule, 20_000) == [5, 1005]


def preceding(schedule: UpdateSchedule, until: int) -> list[int]:
    return [step for step in range(until) if schedule.precedes_fit(step)]


def test_the_seven_steps_before_a_planned_one_are_sampled():
    assert preceding(UpdateSchedule([30]), 60) == list(range(23, 30))
    assert preceding(UpdateSchedule([3, 30]), 60) == [0, 1, 2, *range(23, 30)]
    assert preceding(UpdateSchedule(range(0, 60, 2)), 40) == list(range(40))
    assert preceding(UpdateSchedule(()), 60) == []


def test_what_is_due_by_default_in_any_order_of_steps():
    """Steps for which nothing is planned are not looked up again, and a request is seen there."""
    planned = {0, 1, 7, 100, 2000, 10_000, 20_000}
    codec = SimpleNamespace(is_fitted=True, adaptation=SimpleNamespace(update_steps=None))
    updates = Updates({"": codec})
    for requested in (None, 150, 1500, 9000):
        if requested is not None:
            updates.schedule.request(requested)
        fits = planned | {requested}
        for step in (*range(250), *range(1400, 2100), *range(8900, 10_100), *range(20_003), 3, 150):
            soon = any(later in fits for later in range(step, step + 8))
            assert updates.at(step) == Due(step in fits, False, soon), (requested, step)


def test_steps_before_a_retry_are_sampled():
    schedule = UpdateSchedule([0])
    for failed in (0, 1, 3, 7, 15):
        schedule.done(failed, complete=False)
    assert [step for step in range(16, 60) if schedule.precedes_fit(step)] == list(range(24, 31))


def test_a_function_is_called_once_a_step_in_order_up_to_seven_steps_ahead():
    called = []

    def planned(step: int) -> bool:
        called.append(step)
        return step == 12

    schedule = UpdateSchedule(planned)
    for step in range(20):
        assert schedule.is_due(step) == (step == 12)
        assert schedule.precedes_fit(step) == (5 <= step < 12)
        assert schedule.is_due(step) == (step == 12)
        assert called == list(range(step + 8))
    copied = UpdateSchedule(planned)
    copied.go_on(schedule)
    assert copied.is_due(20) == copied.precedes_fit(20)
    assert called == list(range(28)), "a change of settings forgets no answer"


def test_going_back_calls_a_function_again():
    called = []
    schedule = UpdateSchedule(lambda step: called.append(step) or step == 9)
    assert schedule.precedes_fit(5) and schedule.precedes_fit(3)
    assert called == [*range(5, 13), *range(3, 11)]
