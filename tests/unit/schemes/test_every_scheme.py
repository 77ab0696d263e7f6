"""What holds for every scheme: zeros, clipping, payloads of others; tests/oracle has the rest."""

from __future__ import annotations

import pytest
import torch
from scheme_cases import EVERY, schemes
from test_orq_levels import sample

from hvd_adaptive import ALQ, ECDQ, EDEN, ORQ, QCS, BinGrad, PayloadError, SparseSGD
from hvd_adaptive.kernels.numba import tables as cpu

BUCKET = 128
SCHEMES = schemes(
    *EVERY,
    "alq-3-paper",
    "bingrad-biased",
    "ecdq-variance0.01",
    "nuqsgd-5-p0.8-symmetric",
    "orq-9-half",
    "qcs-mmse",
    "qsgd-4-linf",
    bucket_size=BUCKET,
)
every_scheme = pytest.mark.parametrize("name", SCHEMES)


def gradient(count: int, kind: str = "skewed") -> torch.Tensor:
    return torch.from_numpy(sample(kind, count, 0))


@every_scheme
@pytest.mark.parametrize("keep", (True, False))
def test_zeros_are_exact_and_positive(name, keep):
    scheme = SCHEMES[name](keep_zeros=keep)
    for count in (0, 1, BUCKET, 3 * BUCKET + 1):
        for zeros in (torch.zeros(count), -torch.zeros(count)):
            decoded = scheme.decode(scheme.encode(zeros))
            assert torch.equal(decoded.view(torch.int32), torch.zeros(count, dtype=torch.int32))


@every_scheme
@pytest.mark.parametrize("clip", (0.5, 2.5))
def test_clipping_is_that_of_the_clipped_gradient(name, clip):
    flat = gradient(3 * BUCKET + 77, "heavy")
    clipped = cpu.clipped(flat, BUCKET, clip)
    direct, before = SCHEMES[name](clip=clip), SCHEMES[name](clip=None)
    assert not torch.equal(flat, clipped)
    assert torch.equal(
        direct.decode(direct.encode(flat, seed=3)), before.decode(before.encode(clipped, seed=3))
    )


def test_payloads_of_other_schemes_are_refused():
    made = {name: SCHEMES[name]() for name in EVERY if name != "drive"}  # EDEN with one bit
    payloads = {name: scheme.encode(gradient(300)) for name, scheme in made.items()}
    for own, scheme in made.items():
        for name, payload in payloads.items():
            if name != own:
                with pytest.raises(PayloadError, match=r"scheme |alphabet"):
                    scheme.decode(payload)


@every_scheme
def test_another_bucket_size_is_refused(name):
    with pytest.raises(PayloadError, match=rf"bucket size {BUCKET}|alphabet"):
        SCHEMES[name](bucket_size=2 * BUCKET).decode(SCHEMES[name]().encode(gradient(300)))


# Keywords, others of the same scheme, what a receiver says of such a payload.
FOREIGN = [
    (ALQ, {"bits": 3}, {"bits": 4}, "alphabet 15"),
    (ALQ, {"bits": 3}, {"norm": "l2"}, "settings"),
    (ALQ, {"bits": 3}, {"clip": 2.0, "norm": "l2"}, "settings"),
    (ALQ, {"bits": 3}, {"symmetric": True}, "alphabet 8"),
    (ALQ, {"bits": 3}, {"table": [-1, -0.9, -0.5, 0, 0.5, 0.9, 1]}, "table fingerprint"),
    (ORQ, {"levels": 9}, {"levels": 5}, "alphabet 5"),
    (ORQ, {"levels": 9}, {"level_dtype": "float16"}, "other settings"),
    (BinGrad, {}, {"variant": "biased"}, "other settings"),
    (SparseSGD, {"density": 0.2}, {"density": 0.1}, r"other settings than density=0\.2"),
    (QCS, {"measurements": 40, "quantizer_range": 2}, {"estimator": "mmse"}, "other settings"),
    (QCS, {"measurements": 40, "quantizer_range": 2}, {"measurements": 41}, "other settings"),
    (QCS, {"measurements": 40, "quantizer_range": 2}, {"quantizer_range": 3}, "alphabet 7"),
    (EDEN, {"bits": 2}, {"bits": 3}, "alphabet 8"),
    (ECDQ, {"bits": 2}, {"bits": 3}, "alphabet 18"),
]


@pytest.mark.parametrize(("kind", "keywords", "change", "told"), FOREIGN)
def test_payloads_of_other_settings_are_refused_both_ways(kind, keywords, change, told):
    own, other = (kind(**keywords | more | {"bucket_size": BUCKET}) for more in ({}, change))
    with pytest.raises(PayloadError, match=told):
        own.decode(other.encode(gradient(300)))
    with pytest.raises(PayloadError, match=told.split()[0]):
        other.decode(own.encode(gradient(300)))
