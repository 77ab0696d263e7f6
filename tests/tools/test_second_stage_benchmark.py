"""benchmarks/second_stage.py: what it prints follows from what it says that it computes."""

from __future__ import annotations

import itertools

import pytest
import second_stage
import torch

from hvd_adaptive.tools.methods import parse


@pytest.mark.parametrize("ranks", [2, 4])
def test_stages_of_normal_gradients(ranks):
    """Of equal gradients the first stage's error is that of one rank, divided by the ranks."""
    flat = torch.randn(16 * 8192, generator=torch.Generator().manual_seed(5))
    (method,) = parse(["ALQ(bits=3, symmetric=True)"])
    allgather, *seconds = second_stage._stages(method, [flat] * ranks)
    (alone, *_) = second_stage._stages(method, [flat])
    assert allgather["error"] == pytest.approx(alone["error"] / ranks, rel=0.1)
    packed = 3 + 32 / 8192
    assert allgather["bits sent"] == pytest.approx(packed * (ranks - 1))
    assert [row["second stage"][:1] for row in seconds] == list("345678")[: len(seconds)]
    assert [row["second stage"].endswith("*") for row in seconds[-3:]] == [False, True, False]
    assert seconds[-2]["added"] - seconds[-1]["added"] <= 0.75
    for fewer, more in itertools.pairwise(seconds):
        assert more["added"] < fewer["added"] / 2 and more["error"] < fewer["error"]
    for bits, row in enumerate(seconds, 3):
        total = row["first error"] * (1 + row["added"])  # the second stage is unbiased
        assert row["error"] == pytest.approx(total, rel=0.1)
        sent = (packed + bits + 32 / 8192) * (ranks - 1) / ranks
        assert row["bits sent"] == pytest.approx(sent)
