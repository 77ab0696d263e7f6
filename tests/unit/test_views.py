"""Tensors whose memory does not hold their values as they are: negative views."""

from __future__ import annotations

import pytest
import torch
from default_digests import SCHEMES, numbers
from states import plain


def negative(flat: torch.Tensor) -> torch.Tensor:
    """The same values, in a view with the negative bit."""
    view = torch._neg_view(-flat)
    assert view.is_neg() and torch.equal(view.resolve_neg(), flat)
    return view


@pytest.mark.parametrize("dtype", (torch.float16, torch.float32, torch.float64))
@pytest.mark.parametrize("scheme", ("qsgd-3", "orq-5", "qcs-gain8", "sparse-0.1", "ecdq-2"))
def test_negative_views_are_encoded_as_what_they_are(scheme, dtype):
    codec, flat = SCHEMES[scheme](bucket_size=128), numbers(700, 3, dtype)
    assert torch.equal(codec.encode(negative(flat), seed=1), codec.encode(flat, seed=1))


@pytest.mark.parametrize("scheme", ("alq-3", "alq-3-paper-n-normal", "ecdq-2"))
def test_fits_see_what_they_are(scheme):
    codecs = [SCHEMES[scheme](bucket_size=128) for _ in range(2)]
    for codec, make in zip(codecs, (negative, torch.clone), strict=True):
        codec.fit(make(numbers(1280, 3).square().sqrt() + 1))
    flat = numbers(700, 5)
    assert torch.equal(codecs[0].encode(flat, seed=1), codecs[1].encode(flat, seed=1))
    assert plain(codecs[0].state_dict()) == plain(codecs[1].state_dict())


def test_complex_tensors_are_refused():
    with pytest.raises(ValueError, match="float16, bfloat16, float32 or float64"):
        SCHEMES["qsgd-3"]().encode(torch.zeros(10, dtype=torch.complex64).conj())
