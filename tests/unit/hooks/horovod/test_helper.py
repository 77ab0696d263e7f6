"""When a step is helped with: which sessions a watch looks at, and what makes a step ready."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch

from hvd_adaptive.hooks.horovod.helper import Watch
from hvd_adaptive.hooks.horovod.roll_call import RollCall
from hvd_adaptive.transport.horovod_world import Abandoned, HorovodWorld, patient


class Session:
    """Wants so many looks."""

    def __init__(self, looks: int) -> None:
        self.left, self.looked = looks, 0

    def wants_watch(self) -> bool:
        self.looked += 1
        self.left -= 1
        return self.left > 0


def until(condition) -> bool:
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_a_process_with_one_session_has_no_thread():
    watch, only = Watch(), Session(1)
    watch.add(only)
    watch.add(only)
    watch.wake()
    assert watch._thread is None and not only.looked


def test_every_session_is_looked_at_until_none_wants_it():
    watch, sessions = Watch(), [Session(1), Session(4)]
    for session in sessions:
        watch.add(session)
    watch.wake()
    assert until(lambda: sessions[1].looked == 4)
    time.sleep(0.15)
    assert [session.looked for session in sessions] == [4, 4]
    watch.wake()
    assert until(lambda: sessions[0].looked == 5)
    # One that is gone is not kept.
    del session
    gone = weakref.ref(sessions.pop())
    gc.collect()
    assert gone() is None
    watch.wake()
    time.sleep(0.15)
    assert sessions[0].looked == 5


class Optimizer:
    """As much of Horovod's as a roll call looks at."""

    def __init__(self) -> None:
        self._handles, self._p_to_group = {}, {}
        self._requires_update = {"a", "b", "c"}


class Hvd:
    def __init__(self) -> None:
        self.done: set[int] = set()

    def poll(self, handle):
        if handle < 0:
            raise ValueError("Handle was not created or has been cleared.")
        return handle in self.done

    def synchronize(self, handle):
        return f"of {handle}"


def test_a_step_is_ready_once_all_its_placeholders_are_back():
    hvd, optimizer = Hvd(), Optimizer()
    call = RollCall(hvd, weakref.ref(optimizer), 2)
    assert not call.are_back()
    first = torch.zeros(1)
    call.expect("b", first, 5)
    call.expect("a", torch.zeros(1), 6)
    assert call.first == (first, 5)
    optimizer._handles = {"a": (1, None), "b": (2, None)}
    hvd.done = {1, 2}
    assert not call.are_back()  # no hook of c's has fired
    optimizer._handles["c"] = (None, None)
    assert not call.are_back()  # one has, but more passes are to come
    optimizer._handles["c"] = (lambda: "sparse", None)
    assert call.are_back()
    hvd.done = {1}
    assert not call.are_back()
    optimizer._handles["a"] = (-1, None)
    assert not call.are_back()  # the program has taken it
    group = ("a", "b")
    optimizer._p_to_group = {"a": group, "b": group}
    optimizer._handles = {group: (1, None), "c": (1, None)}
    assert call.are_back()
    del optimizer
    gc.collect()
    assert not call.are_back()


def test_only_the_patient_can_stop_to_wait():
    world = HorovodWorld.__new__(HorovodWorld)
    world.hvd = Hvd()
    assert world.wait(3, "name") == "of 3"
    over = [False, False, True]
    with pytest.raises(Abandoned) as left, patient(lambda: over.pop(0)):
        world.wait(3, "name")
    assert (left.value.name, left.value.handle, over) == ("name", 3, [])
    world.hvd.done = {4}
    with patient(lambda: True):
        assert world.wait(4, "name") == "of 4"
    assert world.wait(3, "name") == "of 3"
