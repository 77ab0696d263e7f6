"""The roll call, which a worker's thread may read while the program waits for placeholders."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hvd_adaptive.hooks.horovod.placeholder import placeholder
from hvd_adaptive.hooks.horovod.roll_call import RollCall


class Handles:
    """Horovod's handles; ``poll`` refuses a handle that has been synchronized."""

    def __init__(self) -> None:
        self.done, self.cleared = False, False

    def poll(self, handle: int) -> bool:
        if self.cleared:
            raise ValueError(f"Handle {handle} was not created or has been cleared.")
        return self.done


@pytest.fixture
def called():
    """A roll call of two equal ranks, Horovod's handles, and what keeps the optimizer alive."""
    hvd, parameter = Handles(), torch.nn.Parameter(torch.zeros(3))
    optimizer = SimpleNamespace(_p_to_group={}, _handles={parameter: (7, None)})
    call = RollCall(hvd, lambda: optimizer, 2)
    call.expect(parameter, sum(placeholder(rank, 4, 0, 5) for rank in range(2)), 4)
    return call, hvd


def test_the_answer_comes_once(called):
    call, hvd = called
    assert call.answer() is None and not call.is_over
    hvd.done = True
    assert call.answer().active == 2
    assert call.answer() is None and call.is_over


def test_a_handle_that_the_program_has_synchronized(called):
    call, hvd = called
    hvd.cleared = True
    assert call.answer() is None and call.is_over
