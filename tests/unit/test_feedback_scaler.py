"""Error feedback under AMP's loss scale, and of gradients that no rank has."""

from __future__ import annotations

import copy
import gc
import math
from types import SimpleNamespace

import pytest
import torch
from feedback_steps import OneRank, gradients
from states import through_disk
from test_feedback import SCHEMES, SIZES

from hvd_adaptive import QSGD
from hvd_adaptive.base.errors import WarnOnce
from hvd_adaptive.ddp import CompressionState
from hvd_adaptive.run import rank_context

SCALES = [2.0**16, 2.0**16, 2.0**17, 2.0**15, 0.5, 0.5]


class Scaler:
    """As a GradScaler, with a scale of the test's."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def get_scale(self) -> float:
        return self.scale


@pytest.mark.parametrize("enabled", (True, False))
@pytest.mark.parametrize("given", (True, False))
@pytest.mark.parametrize("feedback", (0.3, None))
def test_a_forgotten_scaler_is_warned_of(enabled, given, feedback, monkeypatch, caplog):
    gc.collect()  # no scaler of another test is left
    monkeypatch.setattr(rank_context, "_scaler_forgotten", WarnOnce(rank_context.logger))
    scaler = torch.amp.GradScaler("cpu", enabled=enabled)
    keywords = {"grad_scaler": scaler} if given else {}
    compressor = QSGD(bits=2, error_feedback=feedback, **keywords)
    for _ in range(2):
        rank_context.RankContext(compressor, SimpleNamespace(size=1, rank=0))
    forgotten = enabled and not given and feedback is not None
    assert len(caplog.records) == forgotten and ("grad_scaler=" in caplog.text) == forgotten


@pytest.mark.many
@pytest.mark.parametrize("weight", (0.3, "auto"))
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_changing_scale_changes_nothing(scheme, weight):
    """Scales are powers of two, so every bit is that of a run without a scale."""
    scaler, keywords = Scaler(), {"error_feedback": weight, "min_numel": 100}
    plain = OneRank(SCHEMES[scheme](**keywords), SIZES)
    scaled = OneRank(SCHEMES[scheme](grad_scaler=scaler, **keywords), SIZES)
    for step, scale in enumerate(SCALES):
        own = gradients(SIZES, step)
        expected = plain.step(own)
        scaler.scale = scale
        for result, exact in zip(scaled.step([scale * g for g in own]), expected, strict=True):
            assert torch.equal(result, scale * exact)
        for name, residual in plain.residuals().items():
            assert residual.any()
            assert torch.equal(scaled.residuals()[name], residual)
        weights = [rank.compressor._training.residuals.weights for rank in (plain, scaled)]
        assert weights[0].adapted == weights[1].adapted
        assert weights[0].recent == pytest.approx(weights[1].recent)


def test_a_state_holds_residuals_without_the_scale():
    keywords = {"bits": 3, "bucket_size": 64, "error_feedback": 1.0}
    scaler = Scaler(4096.0)
    first = OneRank(QSGD(grad_scaler=scaler, **keywords), [2000])
    second = OneRank(QSGD(**keywords), [2000])
    (g,), (h,) = gradients([2000], 0), gradients([2000], 1)
    first.step([4096 * g])
    second.compressor.load_state_dict(through_disk(first.compressor.state_dict()))
    scaler.scale = 8.0
    assert torch.equal(first.step([8 * h])[0], 8 * second.step([h])[0])


def test_follow_scale_of_a_compression_state():
    """A trainer's scaler serves as the keyword does, also after settings and states have changed;
    the compressor's own takes precedence."""
    keywords = {"bits": 3, "bucket_size": 64, "error_feedback": 1.0}
    (g,), (h,) = gradients([2000], 0), gradients([2000], 1)
    plain = OneRank(QSGD(**keywords), [2000])
    exact = plain.step([g])[0], plain.step([h])[0]
    own, others = Scaler(4096.0), Scaler(8.0)
    for given, followed, used in ((None, own, own), (own, others, own)):
        compressor = QSGD(bits=5, bucket_size=64, error_feedback=1.0, grad_scaler=given)
        CompressionState(compressor).follow_scale(followed)
        compressor.set(bits=3)
        assert copy.deepcopy(compressor)._training.residuals.scaler is used
        compressor.load_state_dict(compressor.state_dict())
        rank = OneRank(compressor, [2000])
        for tensor, expected in zip((g, h), exact, strict=True):
            assert torch.equal(rank.step([4096 * tensor])[0], 4096 * expected)
    state = CompressionState(QSGD(**keywords))
    state.follow_scale(own)
    state.follow_scale(None)
    assert torch.equal(OneRank(state.compressor, [2000]).step([g])[0], exact[0])


@pytest.mark.parametrize("scale", (0.0, math.inf, 1e-45))
def test_a_scale_that_is_none_leaves_residuals_alone(scale):
    scaler = Scaler(2.0)
    rank = OneRank(QSGD(bits=3, bucket_size=64, error_feedback=1.0, grad_scaler=scaler), [2000])
    rank.step(gradients([2000], 0))
    before = rank.residuals()["a"]
    scaler.scale = scale
    rank.step([scale * g for g in gradients([2000], 1)])
    assert torch.equal(rank.residuals()["a"], before)
