"""Error feedback against Eqs 14a-d of the QCS paper written out by hand, and what leaves it as it
was."""

from __future__ import annotations

import pytest
import torch
from feedback_steps import OneRank, after, gradients
from scheme_cases import scheme, schemes

import hvd_adaptive
from hvd_adaptive import ALQ, QSGD
from hvd_adaptive.base.errors import ResidualError
from hvd_adaptive.base.tensors import all_finite
from hvd_adaptive.feedback_weight import PATIENCE, Weights

SIZES = [700, 30, 450]  # "b" travels in full precision
SCHEMES = schemes(
    *("alq-3", "amq-3", "bingrad-biased", "drive", "ecdq-3", "eden-2", "natural", "onebit"),
    *("orq-5", "qcs-k24-range1", "qcs-mmse-gain10", "qsgd-3", "quantile-5", "signsgd"),
    *("sparse-0.2", "terngrad-clip2.5"),
    bucket_size=64,
) | {
    "full tail": scheme("nuqsgd-4", bucket_size=64, tail="full"),
    "two parts": scheme("qsgd-3", bucket_size=64, parameter_bits={"c": 5}),
}


@pytest.mark.many
@pytest.mark.parametrize("weights", ([1.0], [1.0, 0.2, 0.9, 0.01, 0.6, 0.3]), ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_equations_14_by_hand(scheme, weights):
    """Also if β differs from step to step. Gradients stay as they are."""
    rank = OneRank(SCHEMES[scheme](error_feedback=weights[0], min_numel=100), SIZES)
    r = {name: torch.zeros(n, dtype=torch.float64) for name, n in zip("abc", SIZES, strict=True)}
    received, added = dict.fromkeys(r, 0.0), dict.fromkeys(r, 0.0)
    for step in range(6):
        own, weight = gradients(SIZES, step), weights[step % len(weights)]
        rank.compressor._training.residuals.weights = Weights(weight)
        for name, gradient, result in zip(r, own, rank.step(own), strict=True):
            z = gradient.double() + weight * r[name]  # (14a)
            e = z - result.double()  # (14b, c): the lone rank's result is its decoded payload
            r[name] = (1 - weight) * r[name] + e  # (14d)
            received[name] += result.double()
            added[name] += gradient.double()
    residuals = rank.residuals()
    assert "b" not in residuals and r["b"].count_nonzero() == 0
    for name, residual in residuals.items():
        scale = float(r[name].abs().max())
        assert scale > 0
        torch.testing.assert_close(residual.double(), r[name], rtol=0, atol=1e-5 * scale)
        # Whatever the weight, nothing is lost: all sent and the residual are all gradients.
        total = received[name] + residual.double()
        torch.testing.assert_close(total, added[name], rtol=0, atol=1e-5 * scale)


def test_every_scheme_is_among_these():
    made = {type(make()) for make in SCHEMES.values()}
    exported = {getattr(hvd_adaptive, name) for name in hvd_adaptive.__all__}
    assert made == {each for each in exported if hasattr(each, "compress")}


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float64), ids=str)
def test_residuals_are_float32_for_every_dtype(dtype):
    """Half precision: r holds what rounding z would lose; results differ by their own rounding."""
    rank = OneRank(QSGD(bits=6, bucket_size=64, error_feedback=1.0), [2000], [dtype])
    total = torch.zeros(2000, dtype=torch.float64)
    for step in range(4):
        own = gradients([2000], step, [dtype])
        (result,) = rank.step(own)
        assert result.dtype == dtype
        total += own[0].double() - result.double()
    residual = rank.residuals()["a"]
    assert residual.dtype == torch.float32
    rounding = 1e-6 if dtype == torch.float64 else 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(residual.double(), total, rtol=0, atol=4 * rounding)


def test_warm_up_leaves_residuals_alone():
    rank = OneRank(QSGD(bits=2, bucket_size=64, error_feedback=1.0, warmup_steps=2), [2000])
    for step in range(2):
        own = gradients([2000], step)
        assert torch.equal(rank.step(own)[0], own[0])
        assert rank.residuals() == {}
    rank.step(gradients([2000], 2))
    kept = rank.residuals()["a"]
    assert kept.abs().max() > 0
    rank.compressor.step = 0  # as a loaded state may
    own = gradients([2000], 3)
    assert torch.equal(rank.step(own)[0], own[0])
    assert torch.equal(rank.residuals()["a"], kept)


@pytest.mark.parametrize("weight", (0.5, "auto"))
@pytest.mark.parametrize("bad", (float("nan"), -float("inf")))
def test_a_step_that_is_not_finite_leaves_no_trace(bad, weight):
    """AMP skips it on every rank, whichever bucket, group or section holds the bad number."""
    keywords = {"bucket_size": 64, "error_feedback": weight, "min_numel": 100}
    for slot, place in ((0, 3), (1, 0), (2, 449)):
        clean, hurt = (OneRank(QSGD(bits=3, **keywords), SIZES, fusion=500) for _ in range(2))
        assert len(clean.layout.groups) > 1
        for rank in (clean, hurt):
            rank.step(gradients(SIZES, 0))
        own = gradients(SIZES, 1)
        own[slot][place] = bad
        assert not all_finite(hurt.step(own))
        hurt.compressor.step -= 1
        for name, residual in clean.residuals().items():
            assert torch.equal(hurt.residuals()[name], residual)
        kept = [rank.compressor._training.residuals.weights for rank in (hurt, clean)]
        assert kept[0] == kept[1]
        ends = [rank.step(gradients(SIZES, 2)) for rank in (clean, hurt)]
        assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_sums_that_overflow_are_not_taken_for_overflowing_numbers():
    assert all_finite([torch.full((3,), 3e38), torch.full((3,), 1e308, dtype=torch.float64)])
    assert all_finite([torch.full((3,), 60_000.0, dtype=torch.float16), torch.empty(0)])
    for bad in (float("nan"), float("inf"), -float("inf")):
        assert not all_finite([torch.ones(2), torch.tensor([1.0, bad])])


def test_a_step_that_is_given_up_leaves_no_trace():
    plain, torn = (OneRank(SCHEMES["alq-3"](error_feedback=1.0), [5000]) for _ in range(2))
    for rank in (plain, torn):
        rank.step(gradients([5000], 0))
    before = torn.residuals()["a"]
    abandoned = torn.send(torn.begin(), gradients([5000], 1))
    abandoned.abandon()
    abandoned.commit()
    assert torch.equal(torn.residuals()["a"], before)
    torn.send(torn.begin(attempt=1), gradients([5000], 1))  # never ends, is never told to stop
    ends = [rank.step(gradients([5000], 2)) for rank in (plain, torn)]
    assert torch.equal(ends[0][0], ends[1][0])
    assert torch.equal(plain.residuals()["a"], torn.residuals()["a"])


def test_memory_is_two_floats_for_each_quantised_coordinate():
    rank = OneRank(QSGD(bucket_size=64, min_numel=100, tail="full", error_feedback=0.5), SIZES)
    residuals, buffers = rank.compressor._training.residuals, set()
    for step in range(6):
        rank.step(gradients(SIZES, step))
        held = [*residuals._current.values(), *residuals._spare.values()]
        buffers |= {tensor.data_ptr() for tensor in held}
    quantized = sum(group.quantized for group in rank.layout.groups)
    assert quantized == (700 + 450) // 64 * 64
    assert sum(tensor.numel() for tensor in held) == 2 * quantized
    assert len(buffers) == 2, "they change places; nothing is allocated anew"


def test_level_statistics_are_of_what_is_quantised():
    rank = OneRank(ALQ(bits=3, bucket_size=50, min_numel=0, error_feedback=0.5), [200])
    rank.step(gradients([200], 0))
    r, (g,) = rank.residuals()["a"], gradients([200], 1)
    step = rank.begin()
    step._hold = True
    step.arrive(0, g, is_gradient=False)
    torch.testing.assert_close(torch.cat(step.samples(4)), g + 0.5 * r)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
def test_relative_error_is_measured_on_z(dtype):
    """One group of two buckets: all is measured; β = 1 keeps exactly ||z - ẑ||."""
    compressor = QSGD(bits=8, norm="linf", bucket_size=100, min_numel=0, error_feedback=1.0)
    rank = OneRank(compressor, [200], [dtype])
    rank.compressor._training.residuals.lay_out(rank.layout, 0, 1)
    large = 1000 * torch.randn(200, generator=torch.Generator().manual_seed(5))
    rank.compressor._training.residuals.commit({0: large})
    rank.step([torch.full((200,), 1e-3, dtype=dtype)])
    error = rank.residuals()["a"].square().sum() / large.square().sum()
    assert rank.compressor.report()["relative_error"] == pytest.approx(float(error), rel=0.3)


def test_a_weight_too_large_for_the_error_is_told_once(said):
    """By the first of the ranks."""
    rank, other = (
        OneRank(QSGD(bits=2, bucket_size=1000, error_feedback=1.0), [4000], rank_info=(place, 2))
        for place in range(2)
    )
    for step in range(PATIENCE + 1):
        rank.step(gradients([4000], step))
        other.step(gradients([4000], step))
        assert len(said("residuals grow without bound")) == (step + 1 >= PATIENCE)
    with pytest.raises(ResidualError, match=r"error_feedback=1\.0: residuals have outgrown"):
        for step in range(PATIENCE + 1, 3 * PATIENCE):
            rank.step(gradients([4000], step))
    (message,) = said("residuals grow without bound")
    assert "error_feedback=1.0:" in message and "at least 1 for 3 steps" in message
    assert "error_feedback='auto' follows 1/(1 + error)" in message
    recommended = float(message.split("now ")[1].split(",")[0])
    # sqrt(2 d/π) - 1 for a Gaussian bucket and levels -1, 0, 1; less as residuals grow sparse.
    assert 0.9 / 25 < recommended < 0.3


def test_growth_is_counted_in_steps_in_a_row():
    for weight, limit in ((1.0, 1.0), (0.5, 3.0), (0.1, 19.0)):
        weights = Weights(weight)
        nearly = [limit * 1.01] * (PATIENCE - 1)
        for error in [*nearly, limit * 0.99, *nearly, None, *nearly]:
            weights, _ = after(weights, error)
        assert weights.above == {"": PATIENCE - 1}
        assert after(weights, limit)[0].above == {"": PATIENCE}
