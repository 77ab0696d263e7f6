"""ALQ inside stock hvd.DistributedOptimizer."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from conftest import assert_same_everywhere, batches, flat_parameters, learn, make_model, train
from rank_optimizers import distributed

from hvd_adaptive import ALQ, AMQ, NUQSGD, QSGD, TernGrad, Tuning, instances


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"norm": "l2", "symmetric": True},
        {"bits": 2, "normalized": True, "bucket_size": 128},
        {"bits": 4, "symmetric": True, "tail": "full"},
        {"bits": 8, "bucket_size": 100, "fusion_bytes": 40_000, "solver": "gradient_descent"},
        {"bits": 4, "statistics": "normal", "warmup_steps": 3, "update_steps": [0, 2, 5]},
    ],
    ids=str,
)
def test_replicas_stay_equal_and_learn(keywords):
    model = make_model()
    compressor = ALQ(**{"bucket_size": 1024} | keywords)
    optimizer = distributed(model, compressor, lr=0.5)
    left = 1.0
    for _ in range(2):
        left *= learn(model, optimizer, 8)
        assert_same_everywhere(flat_parameters(model), "parameters")
        assert_same_everywhere(compressor.levels.to(torch.float32), "levels")
    assert left < 0.7
    report = compressor.report()
    assert report["coordinates"] == sum(p.numel() for p in model.parameters())
    assert report["wire_bytes"] == report["payload_bytes"] * (hvd.size() - 1)


@pytest.mark.parametrize(
    "construct",
    [
        lambda: QSGD(bits=4, bucket_size=512, norm="linf"),
        lambda: QSGD(intervals=5, bucket_size=64),
        lambda: NUQSGD(bits=4, bucket_size=128),
        lambda: AMQ(bits=3, bucket_size=1024, update_steps=[0, 5]),
        lambda: AMQ(bits=4, bucket_size=1024, symmetric=True, normalized=True),
        lambda: AMQ(bits=8, bucket_size=1024),
        lambda: TernGrad(bucket_size=512),
        lambda: TernGrad(bucket_size=64, clip=None),
        lambda: ALQ(bits=3, bucket_size=1024, clip=2.5),
    ],
    ids=["qsgdinf", "qsgd-s5", "nuqsgd", "amq", "amq-n", "amq-8", "terngrad", "noclip", "clip"],
)
def test_other_schemes_train_with_equal_replicas(construct):
    model = make_model()
    compressor = construct()
    left = learn(model, distributed(model, compressor, lr=0.5))
    assert_same_everywhere(flat_parameters(model), "parameters")
    assert left < 0.7


@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_average_and_sum_against_float32(op):
    """With 8 bits and the gradient of one batch, the result is the exact one within the error
    that the compressor itself reports."""
    exact, compressed = make_model(), make_model()
    compressor = ALQ(bits=8, bucket_size=256)
    optimizers = [
        distributed(exact, hvd.Compression.none, op=getattr(hvd, op)),
        distributed(compressed, compressor, op=getattr(hvd, op)),
    ]
    x, y = batches(hvd.rank())()
    for model, optimizer in zip((exact, compressed), optimizers, strict=True):
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.synchronize()
    pairs = list(zip(exact.parameters(), compressed.parameters(), strict=True))
    error = sum((a.grad - b.grad).square().sum() for a, b in pairs)
    norm = sum(a.grad.square().sum() for a, b in pairs)
    assert 0 < error / norm < 0.01
    # Biases are smaller than min_numel and travel in full precision.
    for a, b in pairs:
        if a.numel() < 1024:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-7)
    assert_same_everywhere(torch.cat([b.grad.reshape(-1) for _, b in pairs]), op)


def test_small_tensors_are_exact_and_ranks_add_in_order():
    model = torch.nn.Linear(10, 3)
    optimizer = distributed(model, ALQ())
    weight = torch.randn(3, 10, generator=torch.Generator().manual_seed(hvd.rank()))
    model.weight.grad, model.bias.grad = None, None
    (model(torch.zeros(1, 10)).sum() * 0 + (model.weight * weight).sum()).backward()
    optimizer.synchronize()
    total = torch.zeros(3, 10)
    for rank in range(hvd.size()):
        total += torch.randn(3, 10, generator=torch.Generator().manual_seed(rank))
    assert torch.equal(model.weight.grad, total * (1.0 / hvd.size()))


def test_same_seed_repeats_bit_for_bit():
    runs = []
    for seed in (5, 5, 6):
        instances.start_over()
        model = make_model()
        optimizer = distributed(model, ALQ(bits=3, seed=seed, bucket_size=512))
        train(model, optimizer, 8)
        runs.append(flat_parameters(model))
        del optimizer
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_integer_and_sparse_gradients_go_through_horovod():
    embedding = torch.nn.Embedding(40, 16, sparse=True)
    head = torch.nn.Linear(16, 100)
    torch.nn.init.constant_(embedding.weight, 0.5)
    named = [("embedding", embedding.weight), ("w", head.weight), ("b", head.bias)]
    optimizer = torch.optim.SGD([p for _, p in named], lr=0.1)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=named, compression=ALQ(bucket_size=128)
    )
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


def test_two_optimizers_in_flight_together():
    """Two networks, each with its own compressor, in one process (names differ, as stock Horovod
    wants it)."""
    pairs = []
    for index in (1, 2):
        model = make_model(index)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            named_parameters=[(f"net{index}.{n}", p) for n, p in model.named_parameters()],
            compression=ALQ(bucket_size=512),
        )
        pairs.append((model, optimizer))
    x, y = batches(hvd.rank())()
    for _ in range(3):
        for model, optimizer in pairs:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
        for _, optimizer in pairs:
            optimizer.step()
    for index, (model, _) in enumerate(pairs):
        assert_same_everywhere(flat_parameters(model), f"model{index}")


def test_half_precision_and_double_parameters():
    torch.manual_seed(0)
    weights = {
        "half": torch.nn.Parameter(torch.randn(64, 64).half()),
        "bfloat": torch.nn.Parameter(torch.randn(64, 64).bfloat16()),
        "double": torch.nn.Parameter(torch.randn(64, 64).double()),
        "tiny": torch.nn.Parameter(torch.randn(7).double()),
    }
    optimizer = torch.optim.SGD(weights.values(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=weights.items(),
        compression=ALQ(bits=8, bucket_size=256),
    )
    for _ in range(2):
        optimizer.zero_grad()
        sum((w * w).sum().float() * 0.5 for w in weights.values()).backward()
        before = {name: w.detach().clone() for name, w in weights.items()}
        optimizer.synchronize()
        for name, w in weights.items():
            assert w.grad.dtype == w.dtype and w.grad.shape == w.shape
            exact = before[name].double()
            assert (w.grad.double() - exact).square().sum() < 0.01 * exact.square().sum()
        # Summed in double precision, in rank order.
        assert torch.equal(
            weights["tiny"].grad, sum([before["tiny"]] * hvd.size()) * (1.0 / hvd.size())
        )
        with optimizer.skip_synchronize():
            optimizer.step()


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


def test_not_a_number_reaches_every_rank():
    model = make_model()
    compressor = ALQ(bucket_size=512)
    optimizer = distributed(model, compressor)
    for step in range(3):
        optimizer.zero_grad()
        x, y = batches(hvd.rank())()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        (loss * float("inf") if step == 0 and hvd.rank() == 1 else loss).backward()
        optimizer.synchronize()
        grads = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        finite = bool(torch.isfinite(grads).all())
        assert finite == (step > 0)
        if finite:
            with optimizer.skip_synchronize():
                optimizer.step()
    # Step 0 fits from the other ranks' buckets, step 1 from all.
    assert compressor.report()["table_version"] == 2
    assert_same_everywhere(flat_parameters(model), "after overflow")


def test_single_tensor_through_hvd_allreduce():
    values = torch.linspace(-1, 1, 5000) * (hvd.rank() + 1)
    compressor = ALQ(bits=8, bucket_size=500)
    result = hvd.allreduce(values, compression=compressor, op=hvd.Average, name="single")
    expected = torch.linspace(-1, 1, 5000) * (hvd.size() + 1) / 2
    assert (result - expected).square().sum() < 0.01 * expected.square().sum()
    assert_same_everywhere(result, "allreduce")
