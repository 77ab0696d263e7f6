"""Gradients copied into a group's flat buffer."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_adaptive.layout import Member, build_layout
from hvd_adaptive.run.arrivals import gather


def numbered(shape) -> torch.Tensor:
    return torch.arange(1.0, 1 + math.prod(shape)).view(shape)


GRADIENTS = {
    "contiguous": numbered,
    "missing": lambda shape: None,
    "transposed": lambda shape: numbered(shape[::-1]).permute(list(range(len(shape)))[::-1]),
    "strided": lambda shape: numbered([*shape, 2])[..., 0],
    "expanded": lambda shape: torch.tensor(3.0).expand(shape),
    "with history": lambda shape: numbered(shape).requires_grad_() * 1,  # of create_graph
    "of another dtype": lambda shape: numbered(shape).double(),
}
shapes = st.lists(st.integers(0, 9), max_size=4)


@given(
    st.lists(st.tuples(shapes, st.sampled_from(sorted(GRADIENTS))), min_size=1, max_size=8),
    st.sampled_from(["quantize", "full"]),
)
def test_every_gradient_in_logical_order(cases, tail):
    """Put back together by slot from the layout's description alone; a missing one is zeros."""
    members = [Member(str(i), tuple(s), torch.float32) for i, (s, _) in enumerate(cases)]
    layout = build_layout(members, min_numel=10, bucket_size=16, tail=tail, most_coordinates=64)
    tensors = [GRADIENTS[kind](shape) for shape, kind in cases]
    found = [torch.full((member.numel,), torch.nan) for member in layout.members]
    for group in layout.groups:
        flat = torch.full((group.coordinates,), 99.0)
        gather(group, tensors, flat)
        assert not flat.requires_grad
        for piece in group.pieces:
            got = flat[piece.at : piece.at + piece.stop - piece.start]
            found[piece.slot][piece.start : piece.stop] = got
    for got, tensor in zip(found, tensors, strict=True):
        want = torch.zeros_like(got) if tensor is None else tensor.reshape(-1).float()
        assert torch.equal(got, want)
