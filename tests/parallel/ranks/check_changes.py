"""Settings that change in the middle of training, on all ranks at the same step."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from training import (
    assert_same_everywhere,
    batches,
    distributed,
    flat_parameters,
    loss_of,
    make_model,
    simulated,
    take_step,
    train,
)

from hvd_adaptive import ALQ, ECDQ, QSGD, ScatterReduce, instances

SMALL = {"bucket_size": 256, "fusion_bytes": 60_000}
# Scheme, its keywords, and the settings from steps on.
CASES = {
    "alq": (
        ALQ,
        {"update_steps": [0, 3]},
        {2: {"bits": 4}, 4: {"exchange": ScatterReduce(second_stage_bits=6)}},
    ),
    "feedback-off-on": (
        QSGD,
        {"bits": 3, "norm": "linf", "error_feedback": 0.5},
        {2: {"error_feedback": None}, 3: {"error_feedback": 1.0}},
    ),
    "ecdq": (
        ECDQ,
        {"bits": 2.0, "update_steps": [0]},
        {1: {"bits": 1.5}, 3: {"bits": None, "relative_variance": 0.1}},
    ),
    "warm": (ALQ, {"warmup_steps": 2}, {4: {"warmup_steps": 6}}),
}
STEPS = 6


@pytest.mark.parametrize("case", CASES)
def test_by_set_by_schedule_and_simulated_alike(case):
    scheme, keywords, changes = CASES[case]
    model, compressor = make_model(dead=150), scheme(**SMALL | keywords)
    optimizer, batch = distributed(model, compressor, lr=0.3), batches(hvd.rank())
    for step in range(STEPS):
        compressor.set(**changes.get(step, {}))
        take_step(optimizer, loss_of(model, batch()))
    assert_same_everywhere(model)
    last = {name: value for change in changes.values() for name, value in change.items()}
    assert repr(compressor) == repr(scheme(**SMALL | keywords | last))

    def scheduled():
        instances.start_over()
        return scheme(**SMALL | keywords, schedule=changes.get)

    other = make_model(dead=150)
    train(other, distributed(other, scheduled(), lr=0.3), STEPS)
    alone, _ = simulated(scheduled, STEPS, lr=0.3)
    for found in (other, alone):
        assert torch.equal(flat_parameters(found), flat_parameters(model))


def test_a_change_between_backward_and_step_holds_for_the_next_one():
    model, compressor = make_model(), ALQ(symmetric=True, update_steps=[])
    optimizer, batch, bits = distributed(model, compressor), batches(hvd.rank()), []
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, batch()).backward()
        if step == 1:
            compressor.set(bits=6)
            assert compressor.parts.default.table.bits == 3
            assert "settings" not in compressor.state_dict()
        optimizer.step()
        if step == 1:
            assert compressor.state_dict()["settings"] == {"bits": 6}
        bits.append(compressor.report()["bits_per_coordinate"])
    assert [more - bits[0] for more in bits] == pytest.approx([0, 0, 3], rel=0.05)
    assert_same_everywhere(model)


def test_settings_that_come_back_have_their_names_back():
    """Names that never repeat would overflow Horovod's response cache."""
    model, names = make_model(), set()
    compressor = QSGD(schedule=lambda step: {"bits": 2 + step % 2})
    optimizer = distributed(model, compressor)
    for _ in range(6):
        train(model, optimizer, 1)
        names.add(compressor._training.connection._binding.name)
    assert len(names) == 2
    assert_same_everywhere(model)
