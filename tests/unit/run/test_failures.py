"""What ranks tell each other of a step: payloads that arrived corrupt, and what must be alike."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hvd_adaptive.base.errors import PayloadError
from hvd_adaptive.exchange.exchange import FailedElsewhereError, Failures, step_failed
from hvd_adaptive.run.agreement import places_that_differ

LABELS = ["first", "second", "third", "fourth"]


def two(*other: int) -> SimpleNamespace:
    """A world of two ranks, of which the second one sends ``other``."""
    gather = lambda own, name="": torch.stack([own, torch.tensor(other)])  # noqa: E731
    return SimpleNamespace(size=2, gather_equal=gather)


@pytest.mark.parametrize("index", [0, 3])
def test_everywhere_names_the_group_that_could_not_be_read(index):
    failures = Failures()
    failures.note(index, PayloadError("here"))
    found, rows = failures.everywhere(2, two(0).gather_equal)
    assert found == {0: index} and rows == [[], []]
    assert f"rank 0 ({LABELS[index]})" in str(step_failed(7, found, LABELS))


def test_everywhere_names_ranks_that_failed_by_themselves():
    """This rank failed because of the other one, if at all."""
    failures = Failures()
    failures.note(1, FailedElsewhereError("there"))
    assert failures.everywhere(2, two(3).gather_equal)[0] == {1: 2}
    assert failures.everywhere(2, two(0).gather_equal)[0] == {0: 1}
    failures.note(2, PayloadError("here"))
    assert failures.everywhere(2, two(0).gather_equal)[0] == {0: 2}


def test_places_that_differ_are_those_from_the_first_rank():
    world = two(1, 5, 3)
    assert places_that_differ(world, [1, 2, 3], "name") == {1: [1]}
    assert places_that_differ(world, [1, 5, 3], "name") == {}
