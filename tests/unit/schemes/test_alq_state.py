"""State and representation."""

from __future__ import annotations

import itertools

import pytest
import torch

from hvd_adaptive import ALQ, AMQ, Tuning


@pytest.mark.parametrize("scheme", (ALQ, AMQ))
def test_state_of_other_bits_norm_or_symmetry_is_refused(scheme):
    """The message names both values of what differs."""
    choices = ({}, {"bits": 4}, {"symmetric": True}, {"norm": "l2"})
    for ours, theirs in itertools.permutations(choices, 2):
        compressor = scheme(**ours)
        before = compressor.levels
        with pytest.raises(ValueError, match="state") as caught:
            compressor.load_state_dict(scheme(**theirs).state_dict())
        told = str(caught.value)
        for name in ours | theirs:
            default = {"bits": 3, "symmetric": False, "norm": "linf"}[name]
            assert all(f"{name}={of.get(name, default)!r}" in told for of in (ours, theirs)), told
        assert torch.equal(compressor.levels, before)


@pytest.mark.parametrize("scheme", (ALQ, AMQ))
def test_states_of_the_former_defaults(scheme):
    """They did not name the norm. They load with the keywords that were the defaults."""
    paper = {"norm": "l2", "symmetric": True}
    old = scheme(bucket_size=100, **paper)
    old.fit(torch.linspace(-1, 1, 1000) ** 3)
    state = old.state_dict()
    del state["norm"]
    told = "symmetric=True.* does not fit symmetric=False.*norm='l2', symmetric=True"
    with pytest.raises(ValueError, match=told):
        scheme(bucket_size=100).load_state_dict(state)
    new = scheme(bucket_size=100, **paper)
    new.load_state_dict(state)
    assert torch.equal(new.levels, old.levels)
    with pytest.raises(ValueError, match="norm='l1'"):
        new.load_state_dict(state | {"norm": "l1"})


def test_repr_names_what_was_chosen():
    chosen = {"bits": 5, "norm": "l2", "bucket_size": 77, "normalized": True, "tail": "full"}
    compressor = ALQ(**chosen)
    text = repr(compressor)
    assert all(f"{name}={value!r}" in text for name, value in chosen.items())
    assert all(f"{name}=" in text for name in ("solver", "statistics", "symmetric"))
    again = eval(text, {"ALQ": ALQ, "Tuning": Tuning})
    assert repr(again) == text and again.settings == compressor.settings
