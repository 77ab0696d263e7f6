"""LocalSGD over torch.distributed."""

import pytest
import torch
from fragment_rounds import *  # noqa: F403
from fsdp_nets import make, sharded
from local_rounds import *  # noqa: F403

from hvd_adaptive import LocalSGD


def test_a_model_of_fsdp2_is_refused():
    inner = torch.optim.SGD(sharded(make()).parameters(), 0.1)
    with pytest.raises(ValueError, match=r"^optimizer: its parameters must not be DTensors"):
        LocalSGD(inner, every=2)
