"""Ranks that differ in settings after their first step know them from their positions alone."""

from __future__ import annotations

import re

import pytest
import torch

from hvd_adaptive import ALQ, QSGD, ScatterReduce
from hvd_adaptive.adapt.updates import NOTHING
from hvd_adaptive.layout import build_layout
from hvd_adaptive.run.agreement import agreed_settings, disagreement, position, settings_row

LAYOUT = build_layout([], min_numel=1, bucket_size=1, tail="quantize", most_coordinates=1)


def told(*compressors):
    """What each rank says; all of them say the same."""
    rows, keywords = [], []
    for compressor in compressors:
        compressor._training.instance.number = 0
        settings = agreed_settings(compressor)
        keywords.append(settings)
        row = settings_row(settings)
        rows.append(position(compressor, 0, LAYOUT, NOTHING, False, row, compares=False))
    said = {disagreement(torch.stack(rows), own) for own in keywords}
    (message,) = said
    return message


def test_ranks_that_agree():
    assert told(ALQ(bits=3), ALQ(bits=3)) == ""


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        ({"bits": 3}, {"bits": 4}, r"settings: bits is 3 on ranks 0, 2, 4 on rank 1\. Every"),
        ({}, {"exchange": "scatter_reduce"}, "exchange is None on ranks 0, 2, 'scatter_reduce' on"),
        ({}, {"exchange": ScatterReduce(second_stage_bits=4)}, r"2, Sc\.\.\. \([0-9a-f]{8}\) on"),
        ({"seed": 2**63}, {"seed": 2**63 + 1}, r"seed is 92\.\.\. \(.{8}\) on ranks 0, 2, 92\.\."),
        (
            {},
            {"parameter_bits": {"é": 4}},
            r"bits is None on ranks 0, 2, {'\\xe9': 4} on",
        ),
    ],
)
def test_the_keyword_and_its_values_are_named(ours, theirs, words):
    message = told(ALQ(**ours), ALQ(**theirs), ALQ(**ours))
    assert message.count("ranks disagree on") == 1
    assert re.search(words, message), message


def test_what_follows_from_settings_is_left_out_but_for_the_step():
    late = ALQ(bits=4)
    late.step = 7
    message = told(ALQ(bits=3), late)
    assert "bits is 3 on rank 0, 4 on rank 1" in message
    assert "the step: its number is 0 on rank 0, 7 on rank 1" in message


def test_ranks_with_other_keywords_know_only_that_they_differ():
    assert "settings: all of them is" in told(QSGD(bits=4), QSGD(intervals=5))
