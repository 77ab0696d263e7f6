"""Groups follow the order in which ranks register parameters, or names if the orders differ."""

from __future__ import annotations

import logging

import horovod.torch as hvd
import pytest
import torch
from training import assert_same_everywhere, distributed, take_step

from hvd_adaptive import ALQ, QSGD, ScatterReduce, Tuning, instances

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
