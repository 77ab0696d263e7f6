"""Placeholders that are kept from step to step."""

from __future__ import annotations

import gc

import pytest
import torch

from hvd_adaptive.hooks.horovod.placeholder import Placeholders
from hvd_adaptive.transport.horovod_world import References, reference


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
