"""Every kind of gradient that a model may have: missing, frozen, tied, strided, empty, sparse."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from conftest import assert_same_everywhere, flat_parameters, make_model, train
from gradient_schemes import assert_average, every_scheme, make
from rank_optimizers import distributed

from hvd_adaptive import QSGD, instances
from hvd_adaptive.simulate.ranks import Ranks


def mean_number() -> float:
    """Of rank + 1 over ranks."""
    return (hvd.size() + 1) / 2


@every_scheme
def test_every_shape_layout_and_dtype_in_one_model(scheme):
    """Values differ between parameters and ranks, so that none can be taken for another."""
    shapes = {"vector": (192,), "matrix": (8, 16), "scalar": (), "empty": (0, 3), "one": (1,)}
    model = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    kinds = {"half": torch.float16, "bfloat": torch.bfloat16, "double": torch.float64}
    for name, dtype in kinds.items():
        model[name] = torch.nn.Parameter(torch.zeros(128, dtype=dtype))
    conv = torch.zeros(8, 4, 2, 2).to(memory_format=torch.channels_last)
    model["channels_last"] = torch.nn.Parameter(conv)
    model["view"], model["turned"] = (torch.nn.Parameter(torch.zeros(16, 8)) for _ in range(2))
    buffer, other = torch.zeros(400), torch.zeros(8, 16)
    compressor = make(scheme)
    optimizer = distributed(model, compressor, lr=1.0)
    for step in range(3):
        for parameter in model.values():
            parameter.grad = None
        # Backward adds to gradients that are there, wherever they lie.
        model["view"].grad = buffer.zero_()[100:228].view(16, 8)
        model["turned"].grad = other.zero_().t()
        weights = {name: (i + 1) * (step + 1) for i, name in enumerate(model)}
        total = sum(
            p.sum().double() * w for p, w in zip(model.values(), weights.values(), strict=True)
        )
        (total * (hvd.rank() + 1)).backward()
        layouts = {name: (p.grad.stride(), p.grad.data_ptr()) for name, p in model.items()}
        optimizer.synchronize()
        for name, parameter in model.items():
            assert parameter.grad.dtype == parameter.dtype, name
            assert parameter.grad.shape == parameter.shape, name
            assert_average(parameter.grad, weights[name] * mean_number())
            assert parameter.grad.stride() == layouts[name][0], name
        assert not buffer[:100].any() and not buffer[228:].any()
        assert_average(buffer[100:228], weights["view"] * mean_number())
        with optimizer.skip_synchronize():
            optimizer.step()
    for name, parameter in model.items():
        assert_same_everywhere(parameter.detach().float(), f"{scheme}.{name}")


@pytest.mark.ranks
@every_scheme
def test_gradients_missing_on_some_ranks_on_all_and_in_turn(scheme):
    names = ("always", "even", "odd", "never", "turn")
    model = {name: torch.nn.Parameter(torch.zeros(96)) for name in names}  # buckets are shared
    optimizer = distributed(model, make(scheme), lr=1.0)
    rank = hvd.rank()
    users = {
        "always": range(hvd.size()),
        "even": range(0, hvd.size(), 2),
        "odd": range(1, hvd.size(), 2),
        "never": (),
    }
    for step in range(4):
        optimizer.zero_grad()
        users["turn"] = (step % hvd.size(),)
        loss = sum(model[name].sum() for name in names if rank in users[name])
        loss.backward()
        optimizer.synchronize()
        assert not model["never"].grad.any()
        with optimizer.skip_synchronize():
            optimizer.step()
    for name, parameter in model.items():
        assert_same_everywhere(parameter.detach(), f"{scheme}.{name}")
    assert not model["never"].any()
    simulated = simulated_run(make(scheme), names, users, 4)
    assert all(torch.equal(simulated[name], model[name]) for name in names)


def simulated_run(compressor, names, users, steps: int) -> dict[str, torch.nn.Parameter]:
    """The same ranks in this process."""
    model = {name: torch.nn.Parameter(torch.zeros(96)) for name in names}
    ranks = Ranks(model.items(), compressor, hvd.size())
    for step in range(steps):
        users["turn"] = (step % hvd.size(),)
        for rank in range(hvd.size()):
            for name, parameter in model.items():
                parameter.grad = torch.ones(96) if rank in users[name] else None
            ranks.take(rank)
        if ranks.due(step):
            ranks.refit(step)
        ranks.average(step)
        compressor.step = step + 1
        with torch.no_grad():
            for parameter in model.values():
                parameter -= parameter.grad
    return model


@every_scheme
def test_frozen_layers_stay_as_they_are_and_learn_again(scheme):
    model = make_model(width=130)
    optimizer = distributed(model, make(scheme, min_numel=10))
    layer = model[2]
    train(model, optimizer, 3)
    layer.requires_grad_(False)
    frozen = [p.detach().clone() for p in layer.parameters()]
    train(model, optimizer, 3, seed=1)
    for now, before in zip(layer.parameters(), frozen, strict=True):
        assert torch.equal(now, before)
    layer.requires_grad_(True)
    train(model, optimizer, 2, seed=2)
    for now, before in zip(layer.parameters(), frozen, strict=True):
        assert not torch.equal(now, before)
    assert_same_everywhere(flat_parameters(model), f"{scheme}.frozen")


@every_scheme
def test_tied_weights(scheme):
    embedding = torch.nn.Embedding(32, 16)
    head = torch.nn.Linear(16, 32, bias=False)
    head.weight = embedding.weight
    model = torch.nn.Sequential(embedding, head)
    assert len(list(model.parameters())) == 1
    optimizer = distributed(model, make(scheme))
    index = torch.arange(32)
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(index), index).backward()
        optimizer.step()
    assert_same_everywhere(flat_parameters(model), f"{scheme}.tied")


@every_scheme
def test_layers_in_another_order_on_each_rank(scheme):
    model = {f"layer{i}": torch.nn.Parameter(torch.zeros(128)) for i in range(6)}
    optimizer = distributed(model, make(scheme, fusion_bytes=4 * 256), lr=1.0)
    names = list(model)
    for step in range(3):
        optimizer.zero_grad()
        order = torch.randperm(6, generator=torch.Generator().manual_seed(10 * step + hvd.rank()))
        for i in order.tolist():  # a backward pass each: hooks fire in this order
            (model[names[i]].sum() * (i + 1) * (hvd.rank() + 1)).backward()
        optimizer.synchronize()
        for i, parameter in enumerate(model.values()):
            assert_average(parameter.grad, (i + 1) * mean_number())
        with optimizer.skip_synchronize():
            optimizer.step()


@every_scheme
def test_zero_grad_either_way(scheme):
    """Horovod's own zero_grad takes no argument; the model's does."""
    ends = []
    for to_none in (True, False):
        instances.start_over()
        model = make_model()
        optimizer = distributed(model, make(scheme, min_numel=1000))
        optimizer.zero_grad = lambda m=model, n=to_none: m.zero_grad(set_to_none=n)
        train(model, optimizer, 3)
        ends.append(flat_parameters(model))
    assert torch.equal(*ends)


def test_a_sparse_gradient_that_all_ranks_miss(caplog):
    """Zeros, as in stock Horovod; if only some missed it, Horovod would wait for ever."""
    embedding = torch.nn.Embedding(32, 8, sparse=True)
    named = {"embedding": embedding.weight, "other": torch.nn.Parameter(torch.zeros(64))}
    optimizer = distributed(named, make("alq"), lr=1.0)
    for step in range(4):
        optimizer.zero_grad()
        loss = named["other"].sum()
        if step % 2 == 0:
            loss = loss + embedding(torch.tensor([hvd.rank()])).sum()
        before = embedding.weight.detach().clone()
        loss.backward()
        optimizer.step()
        assert torch.equal(embedding.weight, before) == (step % 2 == 1)
        told = [m for m in caplog.messages if "embedding" in m and "sparse_as_dense=True" in m]
        assert len(told) == (step > 0)
    assert_same_everywhere(embedding.weight.detach(), "missed")


@pytest.mark.parametrize("missing", [False, True], ids=["all", "missing"])
@every_scheme
def test_two_sparse_embeddings_of_one_shape_as_dense(scheme, missing):
    model = {name: torch.nn.Embedding(32, 8, sparse=True) for name in "ab"}
    named = {name: layer.weight for name, layer in model.items()}
    with torch.no_grad():
        for weight in named.values():
            weight.zero_()
    optimizer = distributed(named, make(scheme), sparse_as_dense=True, lr=1.0)
    index = torch.arange(32)
    for step in range(3):
        optimizer.zero_grad()
        loss = model["a"](index).sum()
        used = not missing or hvd.rank() == step % 2
        if used:
            loss = loss + 3 * model["b"](index).sum()
        loss.backward()
        optimizer.synchronize()
        share = 1 / hvd.size() if missing else 1.0
        assert_average(named["a"].grad.to_dense(), 1.0)
        if scheme != "feedback" or not missing:
            assert_average(named["b"].grad.to_dense(), 3 * share)
        with optimizer.skip_synchronize():
            optimizer.step()
    for name, weight in named.items():
        assert_same_everywhere(weight.detach(), f"{scheme}.{missing}.{name}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_tensor_of_no_parameter_is_reduced_in_float32(dtype):
    """Horovod reduces no bfloat16, and sums of float16 overflow."""
    model, compressor = make_model(), QSGD(bits=4)
    train(model, distributed(model, compressor), 1)
    own = torch.full((5,), 4e4 + 64.0 * hvd.rank(), dtype=dtype)
    found = hvd.allreduce(own, compression=compressor, name=f"check_gradients.{dtype}")
    assert found.dtype == dtype
    exact = 4e4 + 64.0 * (hvd.size() - 1) / 2
    assert found.double() == pytest.approx([exact] * 5, rel=torch.finfo(dtype).eps)
