"""The backward pass of hvd.allreduce(compression=).

Stock Horovod's backward pass names collectives by their numbers. Other checks leave ranks with
different numbers, so these come first (conftest.py).
"""

from __future__ import annotations

import horovod.torch as hvd
import list_averages
import pytest
import torch

from hvd_adaptive import ALQ, QSGD


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("grouped", [False, True], ids=["each", "grouped"])
@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_backward_of_an_allreduce_reduces_the_gradient(op, grouped, dtype):
    """By the same operation, as stock's does."""
    name = f"grad.{op}.{grouped}.{dtype}"
    own = [tensor.to(dtype).requires_grad_() for tensor in list_averages.drawn(hvd.rank(), 0)[:2]]
    squares = [2 * tensor for tensor in own]
    keywords = {"op": getattr(hvd, op), "compression": QSGD(bits=8), "prescale_factor": 1.0}
    if grouped:
        reduced = hvd.grouped_allreduce(squares, name=name, **keywords)
    else:
        reduced = [
            hvd.allreduce(square, name=f"{name}.{k}", **keywords)
            for k, square in enumerate(squares)
        ]
    weights = [torch.linspace(1, 2, t.numel()).view(t.shape).to(dtype) for t in own]
    sum((w * r).sum() * (hvd.rank() + 1) for w, r in zip(weights, reduced, strict=True)).backward()
    ranks = hvd.size()
    factor = 2 * ((ranks + 1) / 2 if op == "Average" else ranks * (ranks + 1) / 2)
    for tensor, weight in zip(own, weights, strict=True):
        torch.testing.assert_close(tensor.grad, weight * factor)


def test_a_result_that_no_loss_needs():
    tensors = [torch.ones(2000, requires_grad=True) for _ in range(2)]
    reduced = hvd.grouped_allreduce(tensors, name="unused", compression=ALQ(bits=4))
    (reduced[0] * (hvd.rank() + 1)).sum().backward()
    mean = (hvd.size() + 1) / 2
    torch.testing.assert_close(tensors[0].grad, torch.full((2000,), mean))
    assert tensors[1].grad is None
