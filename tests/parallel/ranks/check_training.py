"""ALQ inside stock hvd.DistributedOptimizer."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from conftest import assert_same_everywhere, make_model
from rank_optimizers import distributed

from hvd_adaptive import ALQ, QSGD, Tuning


def test_integer_and_sparse_gradients_go_through_horovod():
    embedding = torch.nn.Embedding(40, 16, sparse=True)
    head = torch.nn.Linear(16, 100)
    torch.nn.init.constant_(embedding.weight, 0.5)
    named = {"embedding": embedding.weight, "w": head.weight, "b": head.bias}
    optimizer = distributed(named, ALQ(bucket_size=128))
    for _ in range(2):
        optimizer.zero_grad()
        index = torch.tensor([hvd.rank(), 5, 7])
        head(embedding(index)).sum().backward()
        optimizer.step()
    assert embedding.weight.grad.is_sparse
    assert_same_everywhere(embedding.weight.detach(), "embedding")
    assert_same_everywhere(head.weight.detach(), "head")
    compressor = ALQ()
    counts = torch.arange(4, dtype=torch.int64)
    assert compressor.compress(counts) == (counts, None)


def test_averages_take_the_gradients_place_and_nothing_else_is_written_to():
    """Groups of several members and members of several groups; a gradient that lies elsewhere in
    memory than in order keeps its strides."""
    model = make_model()
    compressor = QSGD(bits=8, bucket_size=64, min_numel=0, fusion_bytes=20_000)
    optimizer = distributed(model, compressor, lr=0.0)
    parameters = list(model.parameters())
    for step in range(2):
        torch.manual_seed(10 * step + hvd.rank())
        for parameter in parameters:
            values = torch.randn_like(parameter)
            turned = parameter is parameters[0]
            parameter.grad = values.t().contiguous().t() if turned else values
        own = [parameter.grad.clone() for parameter in parameters]
        places = [parameter.grad.data_ptr() for parameter in parameters]
        for parameter in parameters:
            optimizer._handles[parameter] = optimizer._allreduce_grad_async(parameter)
        assert all(torch.equal(p.grad, g) for p, g in zip(parameters, own, strict=True))
        optimizer.synchronize()
        assert [p.grad.data_ptr() for p in parameters[1:]] == places[1:]
        for index, (parameter, values) in enumerate(zip(parameters, own, strict=True)):
            exact = hvd.allreduce(values.contiguous(), name=f"exact.{step}.{index}")
            assert (parameter.grad - exact).norm() < 0.05 * values.norm()


@pytest.mark.parametrize("named", [True, False])
def test_allreduce_leaves_its_input_alone(named):
    parameter = torch.nn.Parameter(torch.zeros(3000))
    parameter.grad = torch.randn(3000)
    kept = parameter.grad.clone()
    names = {"named_parameters": [("w", parameter)]} if named else {}
    compressor = QSGD(bucket_size=64, fusion_bytes=4000, **names)
    result = hvd.allreduce(parameter.grad, compression=compressor, name="kept")
    assert torch.equal(parameter.grad, kept)
    assert result.data_ptr() != parameter.grad.data_ptr()


def test_two_parameters_with_one_gradient_in_memory():
    """As autograd leaves it after a sum; the bound makes one wait until the other has come back."""
    model = torch.nn.ParameterDict({name: torch.ones(5000) for name in "abcz"})
    bound = 11_000 * 2 * hvd.size()
    compressor = QSGD(
        bits=8, norm="linf", fusion_bytes=20_000, tuning=Tuning(in_flight_bytes=bound)
    )
    optimizer = distributed(model, compressor, lr=0.0, op=hvd.Sum)
    weight = float(hvd.rank() + 1)
    ((model["a"][None] + model["z"][None]) * weight + model["b"] + model["c"]).sum().backward()
    assert model["a"].grad.data_ptr() == model["z"].grad.data_ptr()
    optimizer.synchronize()
    expected = hvd.size() * (hvd.size() + 1) / 2
    for name in "az":
        assert torch.allclose(model[name].grad, torch.full((5000,), expected), rtol=1e-5)
