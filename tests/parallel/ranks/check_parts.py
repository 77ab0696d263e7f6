"""Tables for each tensor, bits for each pattern, and the order of groups, with stock optimizers."""

from __future__ import annotations

import logging

import horovod.torch as hvd
import pytest
import torch
from training import assert_same_everywhere, distributed, make_model, take_step, train

from hvd_adaptive import ALQ, QSGD, ScatterReduce, Tuning, instances


def test_a_part_without_samples_is_awaited():
    """One rank's layer has no gradient at first: the others' statistics fit its table, and the
    update is repeated until eight steps have one. A sparse parameter is not waited for."""
    embedding = torch.nn.Embedding(300, 16, sparse=True)
    heads = {name: torch.nn.Linear(16, 200, bias=False) for name in ("a", "b")}
    named = {"embedding": embedding.weight} | {n: h.weight for n, h in heads.items()}
    compressor = ALQ(scope="tensor", bucket_size=128, update_steps=[0])
    optimizer = distributed(named, compressor, lr=1e-3)
    versions = []
    for step in range(16):
        x = embedding(torch.tensor([hvd.rank(), 5]))
        weight = 0.0 if step == 0 and hvd.rank() == 1 else 1.0
        take_step(optimizer, heads["a"](x).square().sum() + weight * heads["b"](x).square().sum())
        versions.append([compressor.parts[name].table_version for name in heads])
    assert versions[:3] == [[1, 1], [2, 2], [2, 2]]
    updates = compressor._training.updates
    assert not any(updates.due(step) for step in range(16, 100)), versions
    schedule = updates.schedule.state_dict()
    assert hvd.allgather_object(schedule, name="schedules") == [schedule] * hvd.size()
    assert_same_everywhere(heads["b"].weight)


def test_without_an_optimizer():
    values = torch.linspace(-1, 1, 5000) * (hvd.rank() + 1)
    compressor = ALQ(bits=8, bucket_size=500, scope="tensor")
    result = hvd.allreduce(values, compression=compressor, op=hvd.Average, name="parts.alone")
    expected = torch.linspace(-1, 1, 5000) * (hvd.size() + 1) / 2
    assert (result - expected).square().sum() < 0.01 * expected.square().sum()
    assert compressor.parts["0"].table_version == 1 and compressor.parts.default.table_version == 0
    assert_same_everywhere(result)
    with pytest.raises(ValueError, match=r"parameter_bits: no optimizer.*named_parameters="):
        hvd.allreduce(values, compression=QSGD(parameter_bits={"*": 4}), name="parts.nameless")


def test_more_names_than_horovod_remembers(caplog, monkeypatch):
    monkeypatch.setenv("HOROVOD_CACHE_CAPACITY", "8")
    for scope, told in (("network", 0), ("tensor", 1)):
        model = make_model()
        caplog.clear()
        train(model, distributed(model, QSGD(scope=scope)), 1)
        assert len([m for m in caplog.messages if "9 gradients and groups" in m]) == told, scope


# Natural order of names would put the head first.
SIZES = {"model.a": 5000, "model.b": 300, "model.c": 4000, "head": 2000}
ADAPTIVE = {"bits": 7, "norm": "linf"}
CASES = {
    "allgather": lambda **k: ALQ(update_steps=[0, 2], **ADAPTIVE, **k),
    "scatter": lambda **k: ALQ(exchange=ScatterReduce(second_stage_bits=8), **ADAPTIVE, **k),
    "worker": lambda **k: ALQ(tuning=Tuning(worker=True), **ADAPTIVE, **k),
    "feedback": lambda **k: QSGD(bits=8, norm="linf", error_feedback=0.5, **k),
}


def trained(case: str, names: list[str]) -> tuple[torch.Tensor, list]:
    """Train with parameters registered in this order; return them, and each group's members."""
    instances.start_over()
    compressor = CASES[case](bucket_size=128, fusion_bytes=16384)
    model = {name: torch.nn.Parameter(torch.zeros(SIZES[name])) for name in names}
    optimizer = distributed(model, compressor)
    for step in range(3):
        draw = torch.Generator().manual_seed(10 * step + hvd.rank())
        own = {name: torch.randn(size, generator=draw) for name, size in SIZES.items()}
        take_step(optimizer, sum((p * own[name]).sum() for name, p in model.items()))
    layout = compressor._training.connection.layout
    groups = [sorted(layout.members[slot].name for slot in g.slots) for g in layout.groups]
    whole = torch.cat([model[name].detach() for name in SIZES])
    assert_same_everywhere(whole)
    return whole, groups


@pytest.mark.parametrize("case", CASES)
def test_ranks_may_register_parameters_in_different_orders(case, caplog):
    """The bits are those of groups by name, which is the order of one of the runs."""
    by_name, expected = trained(case, sorted(SIZES))
    assert "different orders" not in caplog.text
    names = list(SIZES) if hvd.rank() % 2 else list(SIZES)[::-1]
    with caplog.at_level(logging.WARNING, logger="hvd_adaptive"):
        whole, groups = trained(case, names)
    assert torch.equal(whole, by_name) and groups == expected
    warned = [r for r in caplog.records if "in different orders" in r.getMessage()]
    assert len(warned) == 1


def test_groups_follow_the_order_of_registration():
    _, groups = trained("allgather", list(SIZES))
    assert groups[0] == ["model.a"] and groups[-1] == ["head"]
    _, by_name = trained("allgather", sorted(SIZES))
    assert by_name[0] == ["head"]
