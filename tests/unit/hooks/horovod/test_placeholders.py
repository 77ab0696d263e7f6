"""Placeholders that are kept from step to step."""

from __future__ import annotations

import gc

import pytest
import torch

from hvd_adaptive.hooks.horovod.placeholder import MODULUS, Template
from hvd_adaptive.hooks.horovod.placeholders import Placeholders
from hvd_adaptive.transport.in_flight import InFlight, reference


def test_each_step_has_the_templates_values():
    """Whatever Horovod and the step before have left in them, in the same tensors."""
    count = MODULUS + 3
    placeholders = Placeholders(count)
    assert len(placeholders) == count
    places = None
    for step in range(3):
        template = Template(rank=1, step=step, fingerprint=12345, progress=7, groups=9)
        placeholders.begin(template)
        tensors = [placeholders.of(slot, absent=slot == 4) for slot in (0, 4, 5, count - 1)]
        for slot, tensor in zip((0, 4, 5, count - 1), tensors, strict=True):
            assert torch.equal(tensor, template.placeholder(slot, absent=slot == 4))
            tensor.mul_(3.0)
        assert places in (None, [id(tensor) for tensor in tensors])
        places = [id(tensor) for tensor in tensors]


def test_a_step_creates_no_objects():
    placeholders, template = Placeholders(500), Template(0, 1, 2)
    placeholders.begin(template)
    before = len(gc.get_objects())
    placeholders.begin(template)
    kept = [placeholders.of(slot) for slot in range(500)]
    assert len(gc.get_objects()) - before < 10 and len(kept) == 500


def test_references_end_with_their_collective_or_generation():
    """A collective that fails keeps its tensors until Horovod has started anew."""
    in_flight, tensors = InFlight(), [torch.zeros(2) for _ in range(4)]
    generation = {1: (tensors[0], tensors[1]), 2: (tensors[2], None, (tensors[3],))}
    for handle in generation:
        in_flight.add(generation, handle)
    held = in_flight._references[2]
    assert [view._base is t for view, t in zip(held, tensors[2:], strict=True)] == [True, True]
    in_flight.end(1)
    in_flight.end(1)
    assert len(in_flight) == 1
    in_flight.add({5: (tensors[0], tensors[0])}, 5)
    assert list(in_flight._references) == [5]


@pytest.mark.parametrize("shape", [(), (0,), (3, 4)])
def test_a_reference_does_not_depend_on_the_shape(shape):
    """Horovod's thread gives an output its size at any time, also while it is referred to."""
    tensor = torch.zeros(shape)
    held = reference(tensor)
    assert held._base is tensor and held.shape == (0,)
    assert tensor.resize_(7).shape == (7,)
