"""Every kind of gradient that a model may have: missing, frozen, tied, strided, empty, sparse."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import simulated_steps
import torch
from torch.nn import Embedding, Linear, Parameter
from training import (
    assert_average,
    assert_same_everywhere,
    distributed,
    every_scheme,
    make,
    make_model,
    take_step,
    train,
    trained,
)

from hvd_adaptive import ALQ, QSGD, Tuning
from hvd_adaptive.simulate.ranks import Ranks


def mean_number() -> float:
    """Of rank + 1 over ranks."""
    return (hvd.size() + 1) / 2


def zeros(*names: str, size: int) -> dict[str, Parameter]:
    return {name: Parameter(torch.zeros(size)) for name in names}


@every_scheme
def test_every_shape_layout_and_dtype_in_one_model(scheme):
    """Values differ between parameters and ranks, so that none can be taken for another. Averages
    take the gradients' place."""
    shapes = {"vector": (192,), "matrix": (8, 16), "scalar": (), "empty": (0, 3), "one": (1,)}
    shapes |= {"view": (16, 8), "turned": (16, 8)}
    model = {name: Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    kinds = {"half": torch.float16, "bfloat": torch.bfloat16, "double": torch.float64}
    for name, dtype in kinds.items():
        model[name] = Parameter(torch.zeros(128, dtype=dtype))
    conv = torch.zeros(8, 4, 2, 2).to(memory_format=torch.channels_last)
    model["channels_last"] = Parameter(conv)
    buffer, other = torch.zeros(400), torch.zeros(8, 16)
    optimizer = distributed(model, make(scheme), lr=1.0)
    for step in range(3):
        for parameter in model.values():
            parameter.grad = None
        # Backward adds to gradients that are there, wherever they lie.
        model["view"].grad = buffer.zero_()[100:228].view(16, 8)
        model["turned"].grad = other.zero_().t()
        weights = {name: (i + 1) * (step + 1) for i, name in enumerate(model)}
        total = sum(p.sum().double() * weights[name] for name, p in model.items())
        total = total + model["vector"].sum().double()  # two layers share it
        (total * (hvd.rank() + 1)).backward()
        weights["vector"] += 1
        strides = {name: p.grad.stride() for name, p in model.items()}
        places = {name: p.grad.data_ptr() for name, p in model.items()}
        optimizer.step()
        for name, parameter in model.items():
            assert parameter.grad.dtype == parameter.dtype, name
            assert parameter.grad.shape == parameter.shape, name
            assert_average(parameter.grad, weights[name] * mean_number())
            assert parameter.grad.stride() == strides[name], name
            if name not in ("turned", "channels_last"):  # they do not lie in order
                assert parameter.grad.data_ptr() == places[name], name
        assert not buffer[:100].any() and not buffer[228:].any()
        assert_average(buffer[100:228], weights["view"] * mean_number())
    assert_same_everywhere(*model.values())


@pytest.mark.ranks
@every_scheme
def test_gradients_missing_on_some_ranks_on_all_and_in_turn(scheme):
    names = ("always", "even", "odd", "never", "turn")
    size = hvd.size()

    def uses(name: str, rank: int, step: int) -> bool:
        own = {"always": True, "even": rank % 2 == 0, "odd": rank % 2 == 1, "never": False}
        return (own | {"turn": rank == step % size})[name]

    model = zeros(*names, size=96)  # buckets are shared
    optimizer = distributed(model, make(scheme), lr=1.0)
    copies, compressor = zeros(*names, size=96), make(scheme)
    ranks = Ranks(copies.items(), compressor, size)
    for step in range(4):
        take_step(optimizer, sum(model[n].sum() for n in names if uses(n, hvd.rank(), step)))
        assert not model["never"].grad.any()
        everyone = [
            [torch.ones(96) if uses(name, rank, step) else None for name in names]
            for rank in range(size)
        ]
        averages = simulated_steps.take_step(ranks, step, list(copies.values()), everyone)
        compressor.step = step + 1
        for name, average in zip(names, averages, strict=True):
            assert torch.equal(average, model[name].grad), name
    assert_same_everywhere(*model.values())
    assert not model["never"].any()


@every_scheme
def test_frozen_layers_stay_as_they_are_and_learn_again(scheme):
    model = make_model(width=130)
    optimizer = distributed(model, make(scheme, min_numel=10))
    layer = model[2]
    train(model, optimizer, 3)
    for requires_grad, seed in ((False, 1), (True, 2)):
        layer.requires_grad_(requires_grad)
        before = [p.detach().clone() for p in layer.parameters()]
        train(model, optimizer, 3, seed=seed)
        for own, parameter in zip(before, layer.parameters(), strict=True):
            assert torch.equal(own, parameter) != requires_grad
    assert_same_everywhere(model)


def test_integer_and_sparse_gradients_go_through_horovod():
    embedding, head = Embedding(40, 16, sparse=True), Linear(16, 100)
    torch.nn.init.constant_(embedding.weight, 0.5)
    named = {"embedding": embedding.weight, "w": head.weight, "b": head.bias}
    optimizer = distributed(named, ALQ(bucket_size=128))
    for _ in range(2):
        take_step(optimizer, head(embedding(torch.tensor([hvd.rank(), 5, 7]))).sum())
    assert embedding.weight.grad.is_sparse
    assert_same_everywhere(*named.values())
    counts = torch.arange(4, dtype=torch.int64)
    assert ALQ().compress(counts) == (counts, None)


@pytest.mark.parametrize("scheme", ["alq", "feedback", "ecdq"])
def test_a_sparse_parameter_is_not_sent_as_zeros(scheme):
    embedding, head = Embedding(3000, 16, sparse=True), Linear(16, 200)
    named = {"embedding": embedding.weight, "head": head.weight}
    compressor = make(scheme, bucket_size=128, fusion_bytes=16_000)
    head.bias.requires_grad_(False)
    optimizer = distributed(named, compressor)
    for _ in range(2):
        take_step(optimizer, head(embedding(torch.tensor([hvd.rank(), 5]))).sum())
    # Only the last piece of the 48,000 zeros shares a group with the dense gradient.
    assert head.weight.numel() <= compressor.report()["coordinates"] < 4000
    assert_same_everywhere(embedding)


def test_a_sparse_gradient_that_all_ranks_miss(caplog):
    """Zeros, as in stock Horovod; if only some missed it, Horovod would wait for ever."""
    embedding = Embedding(32, 8, sparse=True)
    named = {"embedding": embedding.weight} | zeros("other", size=64)
    optimizer = distributed(named, make("alq"), lr=1.0)
    for step in range(4):
        loss = named["other"].sum()
        if step % 2 == 0:
            loss = loss + embedding(torch.tensor([hvd.rank()])).sum()
        before = embedding.weight.detach().clone()
        take_step(optimizer, loss)
        assert torch.equal(embedding.weight, before) == (step % 2 == 1)
        told = [m for m in caplog.messages if "embedding" in m and "sparse_as_dense=True" in m]
        assert len(told) == (step > 0)
    assert_same_everywhere(embedding)


@pytest.mark.parametrize("missing", [False, True], ids=["all", "missing"])
@every_scheme
def test_two_sparse_embeddings_of_one_shape_as_dense(scheme, missing):
    fresh = torch.zeros(32, 8)
    model = {name: Embedding(32, 8, sparse=True, _weight=fresh.clone()) for name in "ab"}
    named = {name: layer.weight for name, layer in model.items()}
    optimizer = distributed(named, make(scheme), sparse_as_dense=True, lr=1.0)
    index = torch.arange(32)
    for step in range(3):
        loss = model["a"](index).sum()
        if not missing or hvd.rank() == step % 2:
            loss = loss + 3 * model["b"](index).sum()
        take_step(optimizer, loss)
        share = 1 / hvd.size() if missing else 1.0
        assert_average(named["a"].grad.to_dense(), 1.0)
        if scheme != "feedback" or not missing:
            assert_average(named["b"].grad.to_dense(), 3 * share)
    assert_same_everywhere(*named.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_tensor_of_no_parameter_is_reduced_in_float32(dtype):
    """Horovod reduces no bfloat16, and sums of float16 overflow."""
    compressor = QSGD(bits=4)
    optimizer = trained(compressor, 1)[1]
    own = torch.full((5,), 4e4 + 64.0 * hvd.rank(), dtype=dtype)
    found = hvd.allreduce(own, compression=compressor, name=f"check_gradients.{dtype}")
    assert found.dtype == dtype
    exact = 4e4 + 64.0 * (hvd.size() - 1) / 2
    assert found.double() == pytest.approx([exact] * 5, rel=torch.finfo(dtype).eps)
    del optimizer


@pytest.mark.parametrize("named", [True, False])
def test_allreduce_leaves_its_input_alone(named):
    parameter = Parameter(torch.zeros(3000))
    parameter.grad = torch.randn(3000)
    kept = parameter.grad.clone()
    names = {"named_parameters": [("w", parameter)]} if named else {}
    compressor = QSGD(bucket_size=64, fusion_bytes=4000, **names)
    result = hvd.allreduce(parameter.grad, compression=compressor, name="kept")
    assert torch.equal(parameter.grad, kept)
    assert result.data_ptr() != parameter.grad.data_ptr()


def test_two_parameters_with_one_gradient_in_memory():
    """As autograd leaves it after a sum; the bound makes one wait until the other has come back."""
    model = zeros(*"abcz", size=5000)
    tuning = Tuning(in_flight_bytes=11_000 * 2 * hvd.size())
    compressor = QSGD(bits=8, norm="linf", fusion_bytes=20_000, tuning=tuning)
    optimizer = distributed(model, compressor, lr=0.0, op=hvd.Sum)
    weight = float(hvd.rank() + 1)
    ((model["a"][None] + model["z"][None]) * weight + model["b"] + model["c"]).sum().backward()
    assert model["a"].grad.data_ptr() == model["z"].grad.data_ptr()
    optimizer.synchronize()
    expected = hvd.size() * (hvd.size() + 1) / 2
    for name in "az":
        assert torch.allclose(model[name].grad, torch.full((5000,), expected), rtol=1e-5)
