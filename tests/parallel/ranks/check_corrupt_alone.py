"""A payload damaged on its way to one rank of Horovod alone, and how to go on."""

from __future__ import annotations

import copy

import horovod.torch as hvd
import pytest
import torch
from conftest import assert_same_everywhere, batches, flat_parameters, learn, make_model, train
from corrupt_alone import *  # noqa: F403
from corrupt_alone import inject
from damage import gone
from rank_optimizers import distributed

from hvd_adaptive import QSGD, PayloadError

pytestmark = [pytest.mark.ranks, pytest.mark.gloo]


def test_as_the_page_says(monkeypatch):
    """docs/failures.md: how to go on."""
    model = make_model()
    optimizer = distributed(model, QSGD(bits=8, norm="linf", seed=19, error_feedback=0.5))
    train(model, optimizer, 1)
    with monkeypatch.context() as patch:
        inject(patch, gone, 0, 0)
        x, y = batches(hvd.rank())()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        with pytest.raises(PayloadError):
            optimizer.step()
    exact = copy.deepcopy(model)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    left = learn(model, optimizer)
    without = learn(exact, distributed(exact, hvd.Compression.none))
    assert without < 0.97 and abs(left - without) < 0.01
    assert_same_everywhere(flat_parameters(model), "gone on")
