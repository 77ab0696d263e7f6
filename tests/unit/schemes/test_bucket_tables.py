"""Schemes with levels for each bucket: unbiased rounding, ratios, special buckets."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
import unit_oracles as oracle
from bucket_oracles import surrounding
from test_orq_levels import sample

from hvd_adaptive import ORQ, BinGrad, LinearQuantile, PayloadError, SignSGD
from hvd_adaptive.codec.bucket_codec import FORMATS
from hvd_adaptive.kernels.numba import levels as cpu_levels

BUCKET = 500
SCHEMES = {
    "orq-3": partial(ORQ, levels=3),
    "orq-9": partial(ORQ, levels=9),
    "orq-9-half": partial(ORQ, levels=9, level_dtype="float16"),
    "orq-5-descent": partial(ORQ, levels=5, solver="coordinate_descent"),
    "orq-129": partial(ORQ, levels=129),
    "linear-5": partial(LinearQuantile, levels=5),
    "linear-4-half": partial(LinearQuantile, levels=4, level_dtype="float16"),
    "linear-250": partial(LinearQuantile, levels=250),
    "bingrad-pb": BinGrad,
    "bingrad-b": partial(BinGrad, variant="biased"),
    "bingrad-b-iterated": partial(BinGrad, variant="biased", iterate=True),
    "signsgd": SignSGD,
}
# Their kernels are not compiled at set-up.
COLD = ("orq-129", "linear-4-half", "linear-250")
NAMES = [pytest.param(n, marks=[pytest.mark.thorough] * (n in COLD), id=n) for n in SCHEMES]
RANDOM = [name for name in NAMES if name.id.startswith(("orq", "linear"))]


def make(name: str, **keywords):
    """A scheme that rounds zeros, as the papers do."""
    return SCHEMES[name](**{"bucket_size": BUCKET, "keep_zeros": False} | keywords)


def gradient(n: int, kind: str = "heavy", seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(sample(kind, n, seed))


@pytest.mark.many
@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize("kind", ("normal", "skewed"))
def test_unbiased_with_the_variance_of_equation_nine(name, kind):
    """Mean and squared error over many encodings, both within 5 standard errors."""
    scheme, repeats = make(name), 400
    flat = gradient(2 * BUCKET + 100, kind)
    exact = flat.double().numpy()
    decoded = np.array(
        [scheme.decode(scheme.encode(flat, seed=s)).double().numpy() for s in range(repeats)]
    )
    lower, upper = np.empty_like(exact), np.empty_like(exact)
    numbers = (
        scheme.parts.default._format.rounded(scheme.parts.default.solve(flat, BUCKET))
        .double()
        .numpy()
    )
    for b, row in enumerate(numbers):
        at = slice(b * BUCKET, (b + 1) * BUCKET)
        assert row[0] <= exact[at].min() and row[-1] >= exact[at].max()
        assert np.all(np.diff(row) >= 0)
        lower[at], upper[at] = surrounding(exact[at], row)
    assert np.all((decoded == lower) | (decoded == upper))
    variance = (exact - lower) * (upper - exact)
    signs = np.random.default_rng(1).choice([-1.0, 1.0], exact.size)
    for weights in (signs, np.ones_like(signs)):
        error = ((decoded - exact) @ weights).mean()
        assert abs(error) < 5 * np.sqrt(variance.sum() / repeats)
    spread = variance * (lower + upper - 2 * exact) ** 2
    squared = np.square(decoded - exact).sum(axis=1).mean()
    assert abs(squared - variance.sum()) < 5 * np.sqrt(spread.sum() / repeats) + 1e-9 * squared


@pytest.mark.parametrize(
    ("name", "paper"),
    [
        ("orq-3", 20.2),
        ("orq-5-descent", 13.8),
        ("orq-9", 10.1),
        ("linear-5", 13.8),
        ("bingrad-pb", 32),
        ("bingrad-b", 32),
        ("signsgd", 32),
    ],
)
def test_ratios_of_the_paper_at_bucket_8192(name, paper):
    """Levels' own bytes counted; headers too."""
    n = 100 * 8192
    payload = make(name, bucket_size=8192).encode(torch.zeros(n))
    assert abs(4 * n / payload.numel() / paper - 1) < 0.03


@pytest.mark.parametrize("name", NAMES)
def test_constant_and_tiny_buckets(name):
    scheme = make(name)
    for value in (-0.3, 3.4e38, 1e-30, 2.0**-126):
        flat = torch.full((BUCKET + 3,), value)
        decoded = scheme.decode(scheme.encode(flat))
        if "half" in name:  # between the two float16 neighbours of the value
            assert ((decoded - flat).abs() <= 2.0**-10 * flat.abs()).all()
        else:
            assert torch.equal(decoded, flat)
    subnormal = torch.full((BUCKET,), 1e-39)
    assert not scheme.decode(scheme.encode(subnormal)).any()


@pytest.mark.parametrize("name", RANDOM)
def test_coordinates_on_levels_stay(name):
    scheme, flat = make(name), gradient(BUCKET)
    row = scheme.parts.default._format.rounded(scheme.parts.default.solve(flat, BUCKET))[0]
    decoded = scheme.decode(scheme.encode(flat))
    on = torch.isin(flat, row)
    assert on.sum() >= 2 or "half" in name
    assert torch.equal(decoded[on], flat[on])


@pytest.mark.parametrize("kind", ("normal", "heavy", "skewed", "outlier", "positive"))
@pytest.mark.parametrize("scale", (2.0**-120, 1e-20, 1.0, 1e30))
def test_float16_levels_bracket_and_survive_the_wire(kind, scale):
    half = FORMATS["float16"]
    values = (sample(kind, 300, 1).astype(np.float64) * scale).astype(np.float32)
    levels = cpu_levels.orq_levels(torch.from_numpy(values), 300, 9, None, 0)
    for signed in (levels, -levels.flip(1).contiguous()):
        rounded = half.rounded(signed)
        assert rounded[0, 0] <= signed[0, 0] and rounded[0, -1] >= signed[0, -1]
        assert (rounded.diff() >= 0).all()
        largest = signed.abs().max().double()
        allowed = 2.0**-10 * signed.double().abs() + 2.0**-27 * largest + 2.0**-136
        assert ((rounded.double() - signed).abs() <= allowed).all()
        section = torch.full((half.section_bytes(1, 9),), 0xFF, dtype=torch.uint8)
        half.write(rounded, section)
        assert torch.equal(half.read(section, 1, 9), rounded)
        assert not section[19:].any()


def test_float16_extremes_beyond_float32_become_nan():
    largest = torch.finfo(torch.float32).max
    rounded = FORMATS["float16"].rounded(torch.tensor([[-1.0, 0.0, largest], [-1, 0, 1]]))
    assert rounded[0].isnan().all() and torch.equal(rounded[1], torch.tensor([-1.0, 0, 1]))


def test_codes_that_no_encoder_makes_become_nan():
    scheme = make("linear-250")
    data = bytearray(scheme.encode(gradient(BUCKET), seed=0).numpy().tobytes())
    data[96 + 1000 : 96 + scheme.parts.default.body_bytes(BUCKET)] = b"\xff" * (
        scheme.parts.default.body_bytes(BUCKET) - 1000
    )
    forged = torch.from_numpy(np.frombuffer(oracle.forge(bytes(data)), np.uint8).copy())
    assert scheme.decode(forged).isnan().all()


OTHERS = {
    "alphabet 5": lambda: ORQ(levels=5, bucket_size=BUCKET),
    "scheme linear_quantile": lambda: LinearQuantile(levels=9, bucket_size=BUCKET),
    "other settings": lambda: ORQ(levels=9, level_dtype="float16", bucket_size=BUCKET),
    "bucket size": lambda: ORQ(levels=9, bucket_size=BUCKET + 1),
}


@pytest.mark.parametrize("topic", OTHERS)
def test_payloads_of_others_are_refused(topic):
    with pytest.raises(PayloadError, match=topic):
        ORQ(levels=9, bucket_size=BUCKET).decode(OTHERS[topic]().encode(gradient(900)))


def test_variants_do_not_read_each_others_payloads_but_solvers_do():
    payload = make("bingrad-pb").encode(gradient(900))
    for other in ("bingrad-b", "signsgd"):
        with pytest.raises(PayloadError, match=r"other settings|scheme bingrad"):
            make(other).decode(payload)
    greedy, descent = (ORQ(levels=5, solver=s) for s in ("greedy", "coordinate_descent"))
    payload = descent.encode(gradient(900))
    assert torch.equal(greedy.decode(payload), descent.decode(payload))
    assert greedy.parts.default.settings_fingerprint != descent.parts.default.settings_fingerprint


@pytest.mark.parametrize(
    ("construct", "message"),
    [
        (lambda: ORQ(levels=4), "levels=4: must be one of 3, 5, 9, 17, 33, 65, 129"),
        (lambda: ORQ(levels=True), "levels=True"),
        (lambda: ORQ(levels=257), "levels=257"),
        (lambda: ORQ(solver="exact"), "solver='exact': must be one of 'greedy', 'coordinate_desc"),
        (lambda: ORQ(level_dtype="bfloat16"), "level_dtype='bfloat16': must be one of 'float32'"),
        (lambda: LinearQuantile(levels=1), "levels=1: must be an integer from 2 to 256"),
        (lambda: BinGrad(variant="unbiased"), "variant='unbiased': must be one of 'partially_b"),
        (lambda: BinGrad(iterate=True), "iterate=True: must be False unless variant='biased'"),
        (lambda: BinGrad(variant="biased", iterate=1), "iterate=1: must be True or False"),
        (lambda: SignSGD(clip=0), "clip=0: must be a number above 0"),
        (lambda: SignSGD(parameter_bits={"*": 4}), "SignSGD.. has no keyword 'bits'"),
    ],
)
def test_wrong_keywords(construct, message):
    with pytest.raises(ValueError, match=message):
        construct()
    for scheme in (ORQ, LinearQuantile, BinGrad, SignSGD):
        with pytest.raises(TypeError):
            scheme(9)
