"""State of compressors with parts."""

from __future__ import annotations

import pytest
import torch
from states import through_disk

from hvd_adaptive import ALQ

PATTERNS = {"conv*": 4, "*.bias": None}
CASES = {
    "tensor": {"scope": "tensor"},
    "bits": {"parameter_bits": PATTERNS},
    "both": {"scope": "tensor", "parameter_bits": PATTERNS},
}
NAMES = ("conv1.weight", "fc.weight")


def fitted(**keywords) -> ALQ:
    compressor = ALQ(bucket_size=100, **keywords)
    for power, name in enumerate(NAMES, 2):
        codec = compressor.parts[compressor.parts.label_of(name)]
        codec.fit(torch.linspace(-1, 1, 1000) ** (2 * power - 1))
    return compressor


def tables(compressor: ALQ) -> dict:
    return {
        label: (codec.levels.tolist(), codec.table_version)
        for label, codec in compressor.parts.items()
    }


@pytest.mark.parametrize("case", CASES)
def test_a_state_replaces_what_was_there(case):
    fresh, used = ALQ(bucket_size=100, **CASES[case]), fitted(**CASES[case])
    used.load_state_dict(through_disk(fresh.state_dict()))
    assert tables(used) == tables(fresh)
    again = used.parts[used.parts.label_of(NAMES[0])]
    assert again.table_version == 0 and again.levels.tolist() == (
        fresh.parts[fresh.parts.label_of(NAMES[0])].levels.tolist()
    )


def test_without_parts_the_state_is_as_it_was():
    entries = {"scheme", "step", "encodes", "table", "norm", "schedule"}
    assert set(ALQ().state_dict()) == entries


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("tensor", "none"), ("none", "tensor"), ("bits", "order"), ("both", "bits"), ("bits", "both")],
)
def test_state_of_another_partition_is_refused(ours, theirs):
    more = {"none": {}, "order": {"parameter_bits": dict(reversed(PATTERNS.items()))}}
    compressor = fitted(**(CASES | more)[ours])
    before = tables(compressor)
    state = through_disk(ALQ(bucket_size=100, **(CASES | more)[theirs]).state_dict())
    with pytest.raises(ValueError, match=r"state: is of scope=.* not of"):
        compressor.load_state_dict(state)
    assert tables(compressor) == before


@pytest.mark.parametrize("harm", ["other bits", "unknown part"])
def test_a_refused_state_changes_nothing(harm):
    """test_malformed_states.py damages every entry."""
    compressor = fitted(parameter_bits=PATTERNS)
    state = ALQ(bucket_size=100, parameter_bits=PATTERNS).state_dict() | {"step": 9}
    state["schedule"] = {"retry_at": 7, "wait": 4}
    before, schedule = tables(compressor), compressor._training.updates.schedule.state_dict()
    part = state["parts"]["bits=4"]
    if harm == "other bits":
        part["table"] = ALQ(bits=5).state_dict()["table"]
    else:
        state["parts"]["bits=7"] = part
    with pytest.raises(ValueError):
        compressor.load_state_dict(state)
    assert tables(compressor) == before and compressor.step == 0
    assert compressor._training.updates.schedule.state_dict() == schedule
