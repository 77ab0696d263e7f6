"""average() over Horovod."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from list_averages import *  # noqa: F403
from list_averages import drawn

from hvd_adaptive import QSGD, average

pytestmark = pytest.mark.gloo


def test_process_sets():
    both = hvd.global_process_set if hvd.size() == 2 else hvd.add_process_set([0, 1])
    if hvd.rank() < 2:
        (result,) = average(drawn(hvd.rank(), 0)[:1], QSGD(bits=8, norm="linf"), group=both)
        wanted = torch.stack([drawn(rank, 0)[0] for rank in (0, 1)]).mean(0)
        assert (result - wanted).norm() < 0.02 * wanted.norm()
    if hvd.size() > 2:
        hvd.remove_process_set(both)
