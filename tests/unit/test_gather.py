"""Gradients copied into a group's flat buffer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_adaptive.layout import Member, build_layout, gather

SHAPES = [(4, 6), (), (3,), (2, 3, 4, 5), (0,), (300,), (40, 9), (1, 1)]


def layout_of(shapes, **options):
    keywords = {
        "min_numel": 10,
        "bucket_size": 16,
        "tail": "quantize",
        "most_coordinates": 64,
    } | options
    members = [Member(str(i), tuple(s), torch.float32) for i, s in enumerate(shapes)]
    return build_layout(members, **keywords)


def collected(layout, tensors) -> dict[int, np.ndarray]:
    """What arrives, put back together by slot from the description alone."""
    out = {slot: np.full(m.numel, np.nan) for slot, m in enumerate(layout.members)}
    for group in layout.groups:
        flat = torch.full((group.coordinates,), 99.0)
        gather(group, tensors, flat)
        assert not flat.requires_grad
        for piece in group.pieces:
            got = flat[piece.at : piece.at + piece.stop - piece.start].numpy()
            out[piece.slot][piece.start : piece.stop] = got
    return out


def numbered(shape, start: float) -> torch.Tensor:
    return torch.arange(int(np.prod(shape)) if shape else 1).float().reshape(shape) + start


@pytest.mark.parametrize("tail", ("quantize", "full"))
def test_contiguous_and_missing(tail):
    layout = layout_of(SHAPES, tail=tail)
    tensors = [numbered(s, 1000 * i) for i, s in enumerate(SHAPES)]
    tensors[3] = tensors[5] = None
    for slot, got in collected(layout, tensors).items():
        want = np.zeros(got.size) if tensors[slot] is None else tensors[slot].numpy().reshape(-1)
        assert np.array_equal(got, want), slot


@given(st.lists(st.lists(st.integers(1, 9), min_size=2, max_size=4), min_size=1, max_size=6))
def test_transposed_strided_and_expanded_gradients_in_logical_order(shapes):
    tensors = []
    for i, shape in enumerate(shapes):
        if i % 3 == 0:
            tensors.append(numbered(shape[::-1], i).permute(*reversed(range(len(shape)))))
        elif i % 3 == 1:
            tensors.append(numbered([*shape[:-1], 2 * shape[-1]], i)[..., ::2])
        else:
            tensors.append(torch.tensor(float(i)).expand(shape))
    layout = layout_of(shapes)
    for slot, got in collected(layout, tensors).items():
        assert np.array_equal(got, tensors[slot].numpy().reshape(-1))


def test_gradients_of_create_graph_are_copied_without_history():
    tensors = [numbered(s, i).requires_grad_() * 1 for i, s in enumerate(SHAPES)]
    got = collected(layout_of(SHAPES), tensors)
    assert np.array_equal(got[0], np.arange(24))


def test_other_dtypes_are_converted_to_the_groups():
    tensor = numbered((4, 6), 0).double()
    assert np.array_equal(collected(layout_of([(4, 6)]), [tensor])[0], np.arange(24))
