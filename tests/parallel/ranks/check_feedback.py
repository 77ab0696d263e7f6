"""Error feedback inside stock hvd.DistributedOptimizer."""

from __future__ import annotations

import pytest
import torch
from feedback_doors import *  # noqa: F403
from training import assert_same_everywhere, train, trained

from hvd_adaptive import QSGD, Tuning
from hvd_adaptive.transport.horovod_world import HorovodWorld


def gathers(monkeypatch) -> list[str]:
    """Names of the collectives of equal tensors from now on."""
    names: list[str] = []
    gather = HorovodWorld.gather_equal

    def counted(self, values, name):
        names.append(name)
        return gather(self, values, name)

    monkeypatch.setattr(HorovodWorld, "gather_equal", counted)
    return names


@pytest.mark.parametrize("worker", (True, False))
def test_ranks_share_the_weights(worker, monkeypatch):
    """Though their gradients differ; and no collective is added to a step."""
    counts = []
    for feedback in (None, "auto"):
        keywords = {"error_feedback": feedback, "tuning": Tuning(worker=worker)}
        compressor = QSGD(bits=2, bucket_size=64, **keywords)
        model, optimizer = trained(compressor, 2)
        names = gathers(monkeypatch)
        weights = []
        for _ in range(3):
            train(model, optimizer, 1)
            if feedback:
                weights.append(compressor._training.residuals.weights.of(""))
        counts.append(len(names))
        monkeypatch.undo()
    assert counts[0] == counts[1] == 3
    assert all(0 < weight < 0.5 for weight in weights) and len(set(weights)) == 3
    assert_same_everywhere(torch.tensor(weights, dtype=torch.float64))
