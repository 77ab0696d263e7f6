"""Tables for each tensor and bits for each pattern, inside stock hvd.DistributedOptimizer."""

from __future__ import annotations

from collections import OrderedDict

import horovod.torch as hvd
import pytest
import torch
from conftest import assert_same_everywhere, make_model, train
from rank_optimizers import distributed

from hvd_adaptive import ALQ, AMQ, QSGD, Tuning

PATTERNS = {"conv*": 4, "*.bias": None}
CASES = {
    "alq_tensor": lambda: ALQ(scope="tensor", bucket_size=256, min_numel=100, update_steps=[0, 4]),
    "alq_bits": lambda: ALQ(parameter_bits=PATTERNS, bucket_size=256, update_steps=[0, 4]),
    "alq_both": lambda: ALQ(
        scope="tensor", parameter_bits=PATTERNS, bucket_size=256, tail="full", update_steps=[0, 4]
    ),
    "alq_cut": lambda: ALQ(
        scope="tensor",
        bucket_size=100,
        fusion_bytes=8000,
        tuning=Tuning(in_flight_bytes=20_000),
        update_steps=[0, 4],
        statistics="normal",
        warmup_steps=1,
    ),
    "amq_bits": lambda: AMQ(parameter_bits={"*": 5}, bucket_size=256, update_steps=[0, 4]),
    "qsgd_bits": lambda: QSGD(parameter_bits=PATTERNS, bucket_size=64, bits=5),
    "qsgd_tensor": lambda: QSGD(scope="tensor", bucket_size=64, norm="linf"),
}


def make_network() -> torch.nn.Module:
    """Weights: conv 20,000 (the kernels see whole images), fc1 20,000, fc2 1,000."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        OrderedDict(
            image=torch.nn.Unflatten(1, (1, 10, 10)),
            conv=torch.nn.Conv2d(1, 200, 10),
            flat=torch.nn.Flatten(),
            relu1=torch.nn.ReLU(),
            fc1=torch.nn.Linear(200, 100),
            relu2=torch.nn.ReLU(),
            fc2=torch.nn.Linear(100, 10),
        )
    )


def layout_names(compressor) -> list[tuple[str, list[str], list[str]]]:
    """For each group its part and the names of its quantised and its other members."""
    layout = compressor._training.layout
    told = []
    for group in layout.groups:
        first = [layout.members[p.slot].name for p in group.pieces if p.at < group.quantized]
        rest = [layout.members[p.slot].name for p in group.pieces if p.at >= group.quantized]
        told.append((group.part, first, rest))
    return told


def test_who_travels_with_whom():
    told = {}
    for case in ("alq_tensor", "alq_bits", "qsgd_tensor"):
        model, compressor = make_network(), CASES[case]()
        train(model, distributed(model, compressor), 1)
        told[case] = layout_names(compressor)
    names = ["conv.weight", "conv.bias", "fc1.weight", "fc1.bias", "fc2.weight"]
    alone = [(name, [name], []) for name in names]
    assert told["alq_tensor"] == [*alone, ("", [], ["fc2.bias"])]
    small = ["conv.bias", "fc1.bias", "fc2.weight", "fc2.bias"]
    conv, fc1 = (["conv.weight"], []), (["fc1.weight"], [])
    assert told["alq_bits"] == [("bits=4", *conv), ("", fc1[0], small)]
    assert told["qsgd_tensor"] == [("conv.weight", *conv), ("", [], small), ("fc1.weight", *fc1)]


def test_a_part_without_samples_is_awaited():
    """One rank's layer has no gradient at first: the others' statistics fit its table, and the
    update is repeated until eight steps have one. A sparse parameter is not waited for."""
    embedding = torch.nn.Embedding(300, 16, sparse=True)
    heads = {name: torch.nn.Linear(16, 200, bias=False) for name in ("a", "b")}
    named = [("embedding", embedding.weight), *((n, h.weight) for n, h in heads.items())]
    compressor = ALQ(scope="tensor", bucket_size=128, update_steps=[0])
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([p for _, p in named], lr=1e-3),
        named_parameters=named,
        compression=compressor,
    )
    versions = []
    for step in range(16):
        optimizer.zero_grad()
        x = embedding(torch.tensor([hvd.rank(), 5]))
        weight = 0.0 if step == 0 and hvd.rank() == 1 else 1.0
        (heads["a"](x).square().sum() + weight * heads["b"](x).square().sum()).backward()
        optimizer.step()
        versions.append([compressor.parts[name].table_version for name in heads])
    assert versions[:3] == [[1, 1], [2, 2], [2, 2]]
    assert not any(compressor._training.updates.due(step) for step in range(16, 100)), versions
    assert_same_everywhere(heads["b"].weight.detach(), "b")


def test_without_an_optimizer():
    values = torch.linspace(-1, 1, 5000) * (hvd.rank() + 1)
    compressor = ALQ(bits=8, bucket_size=500, scope="tensor")
    result = hvd.allreduce(values, compression=compressor, op=hvd.Average, name="parts.alone")
    expected = torch.linspace(-1, 1, 5000) * (hvd.size() + 1) / 2
    assert (result - expected).square().sum() < 0.01 * expected.square().sum()
    assert compressor.parts["0"].table_version == 1 and compressor.parts.default.table_version == 0
    assert_same_everywhere(result, "parts.allreduce")
    with pytest.raises(ValueError, match=r"parameter_bits: no optimizer.*named_parameters="):
        hvd.allreduce(values, compression=QSGD(parameter_bits={"*": 4}), name="parts.nameless")


def test_more_names_than_horovod_remembers(caplog, monkeypatch):
    monkeypatch.setenv("HOROVOD_CACHE_CAPACITY", "8")
    for scope, told in (("network", 0), ("tensor", 1)):
        model = make_model()
        caplog.clear()
        train(model, distributed(model, QSGD(scope=scope)), 1)
        assert len([m for m in caplog.messages if "9 gradients and groups" in m]) == told, scope
