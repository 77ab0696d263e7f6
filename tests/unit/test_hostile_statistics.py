"""Level fitting on statistics that say little or nothing: nothing is raised in the middle of a
step, tables stay valid, and what cannot be fitted is told once."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hostile_buckets import BUCKET, DENORMAL, HUGE, NOT_FINITE, ZEROS, normal, with_value
from scheme_cases import schemes
from simulated_steps import take_step

from hvd_adaptive import ECDQ
from hvd_adaptive.simulate.ranks import Ranks

SCHEMES = schemes(
    *("alq-3", "alq-3-n", "alq-3-normal", "alq-3-n-normal", "alq-3-paper", "alq-3-paper-normal"),
    *("alq-3-paper-n-normal", "alq-8-normal", "alq-3-gradient", "alq-3-huffman", "amq-3"),
    *("amq-3-n-normal", "amq-3-paper", "qsgd-3-huffman", "ecdq-3", "ecdq-variance0.1"),
)
every_scheme = pytest.mark.parametrize("scheme", SCHEMES)

NOTHING = {**NOT_FINITE, **ZEROS, "least": DENORMAL["least"], "largest": HUGE["largest"]}
SAMPLES = {
    "all_equal": [torch.full((BUCKET,), 0.3)] * 4,
    "all_equal_but_signs": [0.3 * normal().sign()] * 4,
    "single": [normal()],
    "of_one_coordinate": [torch.ones(1)],
    "one_hot": [torch.eye(BUCKET)[3]] * 3,
    "two_values": [torch.cat([torch.ones(32), torch.full((32,), -2.0)])] * 2,
    "outlier": [with_value(1e30)] * 3,
    "scales_apart": [normal() * 1e-35, normal() * 1e35, torch.eye(BUCKET)[0] * 3e38],
    "nearly_all_nothing": [*NOTHING.values(), normal()],
}


def make(scheme: str, **keywords):
    return SCHEMES[scheme](bucket_size=BUCKET, min_numel=0, **keywords)


def table(compressor) -> np.ndarray:
    return (
        compressor.parts.default.code.numbers()
        if isinstance(compressor, ECDQ)
        else compressor.levels.numpy()
    )


@pytest.mark.many
@every_scheme
def test_samples_that_say_little_give_a_valid_table(scheme):
    for name, buckets in SAMPLES.items():
        compressor = make(scheme)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # NumPy's, of numbers that are none
            update = compressor.parts.default.refit([compressor.parts.default.collect(buckets)] * 2)
            compressor.parts.default.apply_update(update, 0)
        assert compressor.parts.default.table_version == 1, name
        assert np.isfinite(table(compressor)).all(), name
        if not isinstance(compressor, ECDQ):
            assert (np.diff(table(compressor)) > 0).all() and table(compressor)[-1] == 1, name
        flat = torch.cat([normal(), with_value(20.0)])
        assert compressor.decode(compressor.encode(flat, seed=1)).isfinite().all(), name


@every_scheme
def test_samples_that_say_nothing_keep_the_table(scheme):
    for name, bucket in NOTHING.items():
        compressor = make(scheme)
        if name == "largest" and getattr(compressor.parts.default, "norm", "l2") == "linf":
            continue  # their scale does not overflow
        before = table(compressor)
        complete = compressor.parts.default.apply_update(
            compressor.parts.default.refit([compressor.parts.default.collect([bucket])] * 2), 0
        )
        assert not complete and compressor.parts.default.table_version == 0, name
        assert np.array_equal(table(compressor), before), name


@pytest.mark.parametrize("scheme", ("alq-3", "ecdq-3", "qsgd-3-huffman"))
def test_hostile_statistics_give_a_valid_table_without_a_warning(scheme):
    for poison in (np.nan, np.inf, -1e9, 1e200, 1e308):
        compressor = make(scheme)
        codec = compressor.parts.default
        own = codec.collect([normal()])
        own[10] = poison
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            codec.apply_update(codec.refit([own]), 0)
        assert np.isfinite(table(compressor)).all()
        if not np.isfinite(poison) or poison < 0:
            assert codec.table_version == 0


class TwoRanks:
    """Two ranks' gradients of one parameter of so many buckets, step by step."""

    def __init__(self, compressor, buckets: int = 4) -> None:
        self.compressor, self.buckets = compressor, buckets
        self.parameter = torch.nn.Parameter(torch.zeros(buckets * BUCKET))
        self.ranks = Ranks([("w", self.parameter)], compressor, 2)

    def step(self, step: int, *gradients: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
        """Average the ranks' buckets; a single one stands in all places."""
        everyone = [own if isinstance(own, list) else [own] * self.buckets for own in gradients]
        own = [[torch.cat(buckets)] for buckets in everyone]
        return take_step(self.ranks, step, [self.parameter], own)[0]


def warned(caplog) -> list[str]:
    """What is said of tables; test_rounded_zeros.py has what is said of zeros."""
    told = [r.message for r in caplog.records if r.levelname == "WARNING"]
    return [message for message in told if "exactly zero" not in message]


@pytest.mark.many
@pytest.mark.parametrize("kind", ("zeros", "nan", "inf"))
@every_scheme
def test_an_update_is_put_off_and_told_once(scheme, kind, caplog):
    """Zeros everywhere cannot be fitted to, nor gradients of a step that AMP skips."""
    run, nothing = TwoRanks(make(scheme, update_steps=[0, 1, 2, 3])), NOTHING[kind]
    before = table(run.compressor)
    for step in range(3):
        run.step(step, nothing, nothing)
        assert run.compressor.parts.default.table_version == 0
        assert np.array_equal(table(run.compressor), before)
    (told,) = warned(caplog)
    zeros, others = "all their sampled gradients are zero", "no sampled gradient is finite"
    assert told.endswith(f"fitted later: {zeros if kind == 'zeros' else others}")
    run.step(3, normal(), normal(1))
    assert run.compressor.parts.default.table_version == 1


@pytest.mark.many
@pytest.mark.parametrize("kind", ("nan", "inf"))
@every_scheme
def test_a_table_is_fitted_to_the_finite_buckets(scheme, kind, caplog):
    """A script may replace NaN in each step's gradients, and has no scaler that skips the step."""
    run = TwoRanks(make(scheme, update_steps=[0, 1, 2]), buckets=8)
    alone = TwoRanks(make(scheme, update_steps=[0]), buckets=7)
    bad = NOT_FINITE[kind]
    for step in range(4):
        run.step(step, *([*[normal(8 * rank + i) for i in range(7)], bad] for rank in (0, 1)))
        assert run.compressor.parts.default.table_version == min(step, 2) + 1
        if step == 0:
            alone.step(0, *([normal(8 * rank + i) for i in range(7)] for rank in (0, 1)))
            assert np.array_equal(table(run.compressor), table(alone.compressor))
    (told,) = warned(caplog)
    assert "fitted without 2 of 16 sampled buckets, which contain NaN or Inf" in told


def test_nothing_is_told_where_nothing_is_quantised(caplog):
    parameter = torch.nn.Parameter(torch.zeros(10))  # below min_numel
    ranks = Ranks([("w", parameter)], SCHEMES["alq-3"](update_steps=[0]), 2)
    assert ranks.due(0)
    take_step(ranks, 0, [parameter], [[torch.ones(10)]] * 2)
    assert warned(caplog) == []
