"""``compression=ALQ``, the class, is refused at the first gradient, on every rank."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from conftest import make_model, train

from hvd_adaptive import ALQ, ECDQ

TOLD = r"compression=(ALQ|ECDQ): pass an instance, (ALQ|ECDQ)\(\)"


@pytest.mark.parametrize("scheme", [ALQ, ECDQ])
def test_a_class_is_refused(scheme):
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05),
        named_parameters=model.named_parameters(),
        compression=scheme,
    )
    with pytest.raises(ValueError, match=TOLD):
        train(model, optimizer, 1)
    assert not optimizer._handles, "nothing was sent"


def test_a_class_is_refused_without_an_optimizer():
    with pytest.raises(ValueError, match=TOLD):
        hvd.allreduce(torch.ones(9), compression=ALQ, name="by class")
