"""average() over Horovod, and the backward pass of hvd.allreduce(compression=)."""

from __future__ import annotations

import horovod.torch as hvd
import list_averages
import pytest
import torch

from hvd_adaptive import ALQ, QSGD, average


@pytest.mark.parametrize("maker", list_averages.MAKERS)
def test_bits_are_simulates(maker):
    list_averages.check_bits(hvd.rank(), hvd.size(), maker)


@pytest.mark.parametrize("label", ["alq-3", "ecdq-3", "eden-2", "signsgd"])
def test_averages_are_around_exact_ones(label):
    list_averages.check_exact(hvd.rank(), hvd.size(), label)


def test_none_counts_as_zeros():
    list_averages.check_none(hvd.rank(), hvd.size())


def test_residuals_of_missing_tensors_are_kept():
    list_averages.check_lost_residuals(hvd.rank(), hvd.size())


@pytest.mark.parametrize("differs", list_averages.DIFFERENT)
def test_lists_that_differ(differs):
    list_averages.check_lists_that_differ(hvd.rank(), differs)


def test_settings_that_differ():
    list_averages.check_settings_that_differ(hvd.rank())


def test_asynchronous_calls():
    list_averages.check_async(hvd.rank(), hvd.size())
    list_averages.check_async_error(hvd.rank())


def test_gradients_are_averaged():
    list_averages.check_backward(hvd.rank(), hvd.allreduce)


def test_a_run_resumes():
    list_averages.check_resumed(hvd.rank())


def test_dtypes():
    list_averages.check_half(hvd.rank(), hvd.size())


def test_process_sets():
    both = hvd.global_process_set if hvd.size() == 2 else hvd.add_process_set([0, 1])
    if hvd.rank() < 2:
        compressor = QSGD(bits=8, norm="linf")
        (result,) = average(list_averages.drawn(hvd.rank(), 0)[:1], compressor, group=both)
        wanted = torch.stack([list_averages.drawn(rank, 0)[0] for rank in (0, 1)]).mean(0)
        assert (result - wanted).norm() < 0.02 * wanted.norm()
    if hvd.size() > 2:
        hvd.remove_process_set(both)


def gradients(op, compression, grouped: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    """Of two tensors, through two reductions of tensors that require a gradient."""
    name = f"grad.{op}.{grouped}.{dtype}.{compression is hvd.Compression.none}"
    own = [tensor.to(dtype).requires_grad_() for tensor in list_averages.drawn(hvd.rank(), 0)[:2]]
    squares = [2 * tensor for tensor in own]
    keywords = {"op": op, "compression": compression, "prescale_factor": 1.0}
    if grouped:
        reduced = hvd.grouped_allreduce(squares, name=name, **keywords)
    else:
        reduced = [
            hvd.allreduce(square, name=f"{name}.{k}", **keywords)
            for k, square in enumerate(squares)
        ]
    weights = [torch.linspace(1, 2, t.numel()).view(t.shape).to(dtype) for t in own]
    loss = sum((w * r).sum() * (hvd.rank() + 1) for w, r in zip(weights, reduced, strict=True))
    loss.backward()
    return [tensor.grad for tensor in own]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("grouped", [False, True], ids=["each", "grouped"])
@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_backward_of_an_allreduce_is_stocks(op, grouped, dtype):
    op = getattr(hvd, op)
    stock = gradients(op, hvd.Compression.none, grouped, dtype)
    for own, wanted in zip(gradients(op, QSGD(bits=8), grouped, dtype), stock, strict=True):
        torch.testing.assert_close(own, wanted)


def test_a_result_that_no_loss_needs():
    tensors = [torch.ones(2000, requires_grad=True) for _ in range(2)]
    reduced = hvd.grouped_allreduce(tensors, name="unused", compression=ALQ(bits=4))
    (reduced[0] * (hvd.rank() + 1)).sum().backward()
    mean = (hvd.size() + 1) / 2
    torch.testing.assert_close(tensors[0].grad, torch.full((2000,), mean))
    assert tensors[1].grad is None
