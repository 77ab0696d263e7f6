"""What every compressor does with any tensor, and its report before the first step."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from scheme_cases import CASES, EVERY, scheme, schemes
from states import plain
from torch import nn

import hvd_adaptive
from hvd_adaptive import ALQ, EDEN, QSGD, LocalSGD, compressor, simulate
from hvd_adaptive.base.errors import WarnOnce
from hvd_adaptive.base.tensors import check_supported
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.ddp import CompressionState

THERE = torch.ones(3000, device="meta")
DOORS = {
    "encode": lambda: QSGD(bits=4).encode(THERE),
    "rotated": lambda: EDEN(bits=2).encode(THERE),
    "decode": lambda: QSGD(bits=4).decode(THERE.to(torch.uint8)),
    "fit": lambda: ALQ(bits=4).fit([torch.ones(3000), THERE]),
    "local": lambda: LocalSGD(torch.optim.SGD([nn.Parameter(THERE)], lr=0.1), every=2),
    "ddp": lambda: CompressionState(
        QSGD(bits=4), nn.Linear(2, 2, device="meta").named_parameters()
    ),
}


def test_every_scheme_is_among_the_cases_and_no_two_cases_are_the_same():
    public = {getattr(hvd_adaptive, name) for name in hvd_adaptive.__all__}
    classes = {thing for thing in public if isinstance(thing, type)}
    made = [type(make()) for make in schemes(*EVERY).values()]
    assert len(made) == len(set(made))
    assert set(made) == {kind for kind in classes if issubclass(kind, GradientCompressor)}
    calls = [(type(make()), repr(getattr(make, "keywords", {}))) for make in CASES.values()]
    assert len(set(calls)) == len(calls)


def test_a_class_is_no_compressor():
    with pytest.raises(ValueError, match="compressor=ALQ: is a class; give an instance"):
        simulate.Ranks([("w", nn.Parameter(torch.zeros(9)))], ALQ, 2)
    with pytest.raises(ValueError, match=r"compression=ALQ: pass an instance, ALQ\(\)"):
        ALQ.compress(torch.ones(3))
    assert QSGD.compress.__doc__ == QSGD().compress.__doc__
    tensor = torch.ones(3, dtype=torch.int64)
    assert QSGD.compress(QSGD(), tensor)[0] is tensor, "as any method, called on the class"


def test_what_is_no_compressor_is_not_described():
    with pytest.raises(ValueError, match="compressor=3: must be a compressor of hvd_adaptive"):
        hvd_adaptive.describe(3)
    with pytest.raises(ValueError, match=r"compressor=<class .*ALQ'>: must be a compressor"):
        hvd_adaptive.describe(hvd_adaptive.ALQ)


@pytest.mark.parametrize("door", DOORS)
def test_every_door_names_a_device_that_nothing_supports(door):
    with pytest.raises(ValueError, match="tensors on meta: must be on the CPU or a GPU of CUDA"):
        DOORS[door]()


def test_other_accelerators():
    for kind in ("xpu", "hpu", "mps", "privateuseone"):
        with pytest.raises(ValueError, match=f"tensors on {kind}: must be on the CPU or a GPU"):
            check_supported(torch.device(kind))


def test_a_report_before_the_first_step_explains_one_rank_once(request, monkeypatch, caplog):
    monkeypatch.setattr(compressor, "_warn_alone", WarnOnce(compressor.logger))
    with caplog.at_level(logging.WARNING, "hvd_adaptive"):
        QSGD(bits=4).report()
        assert not caplog.messages
        request.getfixturevalue("alone")
        figures = QSGD(bits=4).report()
        QSGD(bits=4).report()
    assert figures["coordinates"] == 0 and math.isnan(figures["relative_error"])
    (message,) = caplog.messages
    assert "one rank exchanges nothing" in message and "mpirun -np 2" in message


def numbers(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(1280, generator=torch.Generator().manual_seed(3)).to(dtype)


def negative(flat: torch.Tensor) -> torch.Tensor:
    """The same values, in a view with the negative bit: its memory does not hold them as they
    are."""
    view = torch._neg_view(-flat)
    assert view.is_neg() and torch.equal(view.resolve_neg(), flat)
    return view


@pytest.mark.parametrize("dtype", (torch.float16, torch.float32, torch.float64))
@pytest.mark.parametrize("name", ("qsgd-3", "orq-5", "qcs-gain8", "sparse-0.1", "ecdq-2"))
def test_negative_views_are_encoded_as_what_they_are(name, dtype):
    codec, flat = scheme(name)(bucket_size=128), numbers(dtype)
    assert torch.equal(codec.encode(negative(flat), seed=1), codec.encode(flat, seed=1))


@pytest.mark.parametrize("name", ("alq-3", "alq-3-paper-n-normal", "ecdq-2"))
def test_fits_see_negative_views_as_what_they_are(name):
    codecs = [scheme(name)(bucket_size=128) for _ in range(2)]
    for codec, make in zip(codecs, (negative, torch.clone), strict=True):
        codec.fit(make(numbers().abs() + 1))
    assert plain(codecs[0].state_dict()) == plain(codecs[1].state_dict())


def test_complex_tensors_are_refused_but_not_their_parts():
    codec = QSGD(bits=3)
    conjugate = torch.complex(numbers(), numbers()).conj()
    assert torch.equal(codec.encode(conjugate.imag, seed=1), codec.encode(-numbers(), seed=1))
    with pytest.raises(ValueError, match="float16, bfloat16, float32 or float64"):
        codec.encode(conjugate)
