"""Collectives in flight of a Horovod that the tests imitate."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hvd_adaptive.transport.horovod_world import Handles

SAME = "Requested to allreduce a tensor with the same name as another tensor"


class Horovod:
    """A world and its Horovod, which knows names that an earlier generation has ``left``."""

    def __init__(self, *left: str) -> None:
        self.hvd, self.process_set = self, None
        self.mpi_ops = SimpleNamespace(_handle_map={})
        self.names = list(left)

    def start(self, *tensors: object, name: str, process_set: None) -> int:
        if not tensors:
            raise ValueError("splits not provided")
        if name in self.names:
            raise ValueError(SAME)
        self.names.append(name)
        handle = len(self.names)
        self.mpi_ops._handle_map[handle] = tensors
        return handle


def test_references_end_with_their_collective_or_generation():
    """A collective that fails keeps its tensors until Horovod has started anew."""
    in_flight, tensors, horovod = Handles(), [torch.zeros(2) for _ in range(4)], Horovod()
    first = in_flight.submit(horovod, horovod.start, *tensors[:2], name="a")
    second = in_flight.submit(horovod, horovod.start, tensors[2], None, (tensors[3],), name="b")
    name, held = in_flight[second]
    assert name == "b"
    assert [view._base is t for view, t in zip(held, tensors[2:], strict=True)] == [True, True]
    in_flight.pop(first)
    assert len(in_flight) == 1
    horovod = Horovod("a")
    last = in_flight.submit(horovod, horovod.start, tensors[0], name="c")
    assert list(in_flight) == [last]


def test_a_collective_that_outlived_its_horovod_ends_the_generation():
    """An elastic program catches HorovodInternalError alone; a name of this generation is an error
    of the program."""
    from horovod.common.exceptions import HorovodInternalError

    in_flight, horovod = Handles(), Horovod("old")
    handle = in_flight.submit(horovod, horovod.start, torch.zeros(1), name="new")
    with pytest.raises(HorovodInternalError, match=r"^old: .* since hvd.shutdown\(\)"):
        in_flight.submit(horovod, horovod.start, torch.zeros(1), name="old")
    with pytest.raises(ValueError, match="same name"):
        in_flight.submit(horovod, horovod.start, torch.zeros(1), name="new")
    with pytest.raises(ValueError, match="splits"):
        in_flight.submit(horovod, horovod.start, name="other")
    assert list(in_flight) == [handle]
