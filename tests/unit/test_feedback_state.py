"""Residuals in a compressor's state: by parameters' names, or it is told why not.

test_reachable_states.py continues runs bit for bit, horovod/test_elastic_state.py in other layouts.
"""

from __future__ import annotations

import pytest
import torch
from feedback_steps import OneRank, gradients
from states import through_disk

from hvd_adaptive import ALQ, QSGD

SIZES = [700, 30, 450]


def make(weight: float | None = 0.5, **keywords) -> ALQ:
    return ALQ(bits=3, bucket_size=64, min_numel=100, error_feedback=weight, **keywords)


def trained(steps: int = 2, rank_info=(1, 4), sizes=SIZES, **keywords) -> OneRank:
    rank = OneRank(make(**keywords), sizes, rank_info=rank_info)
    rank.compressor.fit(gradients(sizes, 99))
    for step in range(steps):
        rank.step(gradients(sizes, step))
    return rank


def resumed(old: OneRank, sizes=SIZES, rank_info=(1, 4), fusion=None, **keywords) -> OneRank:
    """Another process: the state is loaded before the first step."""
    new = OneRank(make(**keywords), sizes, rank_info=rank_info, fusion=fusion)
    new.compressor.load_state_dict(through_disk(old.compressor.state_dict()))
    return new


def test_a_step_in_progress_is_not_in_the_state():
    rank = trained()
    before = rank.residuals()
    rank.send(rank.begin(), gradients(SIZES, 2))
    assert all(torch.equal(before[name], r) for name, r in rank.residuals().items())


def test_other_groups_keep_every_residual(caplog):
    """Groups are cut smaller as ranks grow; here by fusion_bytes, some tensors within."""
    old = trained()
    new = resumed(old, fusion=256)
    assert new.compressor.state_dict()["residuals"]["size"] == 4, "before any step, too"
    new.begin()
    assert len(new.layout.groups) > len(old.layout.groups)
    assert list(new.residuals()) == ["a", "c"]
    assert all(torch.equal(new.residuals()[name], r) for name, r in old.residuals().items())
    assert not caplog.messages


@pytest.mark.parametrize("rank_info", [(0, 4), (1, 3)])
def test_another_ranks_residuals_are_left_out(rank_info, caplog):
    old = trained()
    new = resumed(old, rank_info=rank_info)
    results = new.step(gradients(SIZES, 2))
    told = "saved by rank 1 of 4, and this is rank {} of {}".format(*rank_info)
    assert [told in message for message in caplog.messages] == [True]
    assert torch.equal(new.compressor.levels, old.compressor.levels), "tables are kept"
    fresh = OneRank(make(), SIZES, rank_info=rank_info)
    fresh.compressor.load_state_dict(without_residuals(old))
    assert torch.equal(fresh.step(gradients(SIZES, 2))[0], results[0])


def without_residuals(rank: OneRank) -> dict:
    state = rank.compressor.state_dict()
    del state["residuals"], state["residuals_checksum"]
    return state


def test_parameters_of_another_shape_start_from_zero(caplog):
    sizes = [700, 30, 451]
    old = trained()
    new = resumed(old, sizes)
    new.begin()
    told = "starts from zero for 1 parameters that were removed, reshaped or are no longer"
    assert [told in m and m.endswith(": c") for m in caplog.messages] == [True]
    assert torch.equal(new.residuals()["a"], old.residuals()["a"])
    assert new.residuals()["c"].count_nonzero() == 0
    caplog.clear()
    resumed(old, [700]).begin()
    assert ["for 1 parameters" in message for message in caplog.messages] == [True]


@pytest.mark.parametrize("change", ["a tensor", "all tensors", "the rank", "nothing is left"])
def test_residuals_of_several_ranks_are_refused(change):
    """As a checkpoint that keeps one value of a name returns them."""
    rank, other = trained(), trained(seed=1)
    before, state = rank.residuals(), rank.compressor.state_dict()
    saved, foreign = state["residuals"], other.residuals()
    if change == "nothing is left":
        del state["residuals"]
    elif change == "the rank":
        saved["rank"] = 0
    else:
        saved["parameters"] |= foreign if change == "all tensors" else {"c": foreign["c"]}
    with pytest.raises(ValueError, match="residuals are missing, or of several ranks"):
        make().load_state_dict(state)
    assert all(torch.equal(before[name], r) for name, r in rank.residuals().items())


def test_a_state_without_residuals_clears_them(caplog):
    for weight in (0.5, None):
        compressor = trained().compressor
        compressor.load_state_dict(make(weight).state_dict())
        assert compressor._training.residuals.weights.given == 0.5
        assert "residuals" not in compressor.state_dict()
    assert not caplog.messages


def test_residuals_that_nobody_uses_are_told(caplog):
    new = make(None)
    new.load_state_dict(trained().compressor.state_dict())
    assert ["error_feedback=None" in message for message in caplog.messages] == [True]
    assert "residuals" not in new.state_dict()


def test_adapted_weights_are_in_the_state():
    old = trained(weight="auto")
    weights = old.compressor._training.residuals.weights.adapted
    assert list(weights) == [""] and 0 < weights[""] < 1
    assert old.compressor.state_dict()["feedback_weights"] == weights
    between = make("auto")
    between.load_state_dict(through_disk(old.compressor.state_dict()))
    assert between.state_dict()["feedback_weights"] == weights
    fixed = make(0.5)
    fixed.load_state_dict(old.compressor.state_dict())
    assert fixed._training.residuals.weights.of("") == 0.5
    assert "feedback_weights" not in fixed.state_dict()


def test_residuals_of_another_weight_wait_for_the_first_error():
    """Without an error 1/(1 + error) is not known: what is held is added from the next step on."""
    old, own = trained(), gradients(SIZES, 2)
    new, plain = resumed(old, weight="auto"), OneRank(make(None), SIZES, rank_info=(1, 4))
    plain.compressor.load_state_dict(without_residuals(old))
    assert new.compressor._training.residuals.weights.of("") == 0
    assert all(torch.equal(a, b) for a, b in zip(new.step(own), plain.step(own), strict=True))
    assert 0 < new.compressor._training.residuals.weights.of("") < 1
    for name, slot in (("a", 0), ("c", 2)):  # and nothing is lost
        sent = new.residuals()[name] - old.residuals()[name] - own[slot]
        assert float(sent.norm()) > 0.5 * float(own[slot].norm())


@pytest.mark.parametrize(
    "wrong", [{"": 0.0}, {"": 1.5}, {"": float("nan")}, {"": "1"}, {3: 0.5}, [0.5]], ids=str
)
def test_a_state_with_wrong_weights_is_refused(wrong):
    rank = trained(weight="auto")
    before, weights = rank.residuals(), rank.compressor._training.residuals.weights
    with pytest.raises(ValueError, match="state: feedback_weights"):
        rank.compressor.load_state_dict(
            rank.compressor.state_dict() | {"step": 77, "feedback_weights": wrong}
        )
    assert rank.compressor.step == 2 and rank.compressor._training.residuals.weights == weights
    assert all(torch.equal(before[name], r) for name, r in rank.residuals().items())


def test_ranks_must_agree_on_the_weight():
    prints = {
        QSGD(error_feedback=weight).parts.default.settings_fingerprint
        for weight in (None, 0.5, 1.0, 1, "auto")
    }
    assert len(prints) == 4
    assert "error_feedback=0.5" in repr(QSGD(error_feedback=0.5))
