"""Settings that change in the middle of training, on all ranks at the same step or not."""

from __future__ import annotations

import itertools

import horovod.torch as hvd
import pytest
import torch
from conftest import assert_same_everywhere, batches, flat_parameters, make_model, train
from gradient_schemes import every_scheme, make
from rank_optimizers import distributed

from hvd_adaptive import (
    ALQ,
    ECDQ,
    ORQ,
    QSGD,
    RankMismatchError,
    ScatterReduce,
    SignSGD,
    instances,
    simulate,
)

SEEDS = itertools.count(7000)
SMALL = {"bucket_size": 256, "fusion_bytes": 60_000}
# Scheme, its keywords, and the settings from steps on.
CASES = {
    "alq": (
        ALQ,
        {"update_steps": [0, 3]},
        {2: {"bits": 4}, 4: {"exchange": ScatterReduce(second_stage_bits=6)}},
    ),
    "qsgd": (QSGD, {"bits": 4}, {1: {"coding": "huffman"}, 3: {"bits": 2, "norm": "linf"}}),
    "orq": (ORQ, {"levels": 5}, {2: {"levels": 9, "bucket_size": 512}}),
    "feedback": (SignSGD, {"error_feedback": 1.0}, {2: {"bucket_size": 64}, 4: {"seed": 4}}),
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
STEPS, SIMULATED = 6, ("alq", "feedback-off-on")


def trained_by_set(scheme, keywords, changes):
    """Parameters, losses and bits per coordinate of each step."""
    model, compressor = make_model(), scheme(**SMALL | keywords)
    optimizer = distributed(model, compressor, lr=0.3)
    batch, losses, bits = batches(hvd.rank()), [], []
    for step in range(STEPS):
        compressor.set(**changes.get(step, {}))
        x, y = batch()
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        bits.append(compressor.report()["bits_per_coordinate"])
    return model, compressor, losses, bits


@pytest.mark.parametrize("case", CASES)
def test_by_set_by_schedule_and_simulated_alike(case):
    scheme, keywords, changes = CASES[case]
    keywords = keywords | {"seed": next(SEEDS)}
    model, compressor, losses, _ = trained_by_set(scheme, keywords, changes)
    assert_same_everywhere(flat_parameters(model), case)
    last = {name: value for change in changes.values() for name, value in change.items()}
    assert repr(compressor) == repr(scheme(**SMALL | keywords | last))
    assert losses[-1] < losses[0]

    instances.start_over()
    scheduled = make_model()
    other = scheme(**SMALL | keywords, schedule=changes.get)
    train(scheduled, distributed(scheduled, other, lr=0.3), STEPS)
    assert torch.equal(flat_parameters(scheduled), flat_parameters(model))
    if case not in SIMULATED:
        return

    sources = [batches(rank) for rank in range(hvd.size())]
    simulated = make_model()
    simulate.train(
        simulated,
        lambda rank, step: sources[rank](),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.3),
        compressor=scheme(**SMALL | keywords, schedule=changes.get),
        workers=hvd.size(),
        steps=STEPS,
        progress=False,
    )
    assert torch.equal(flat_parameters(simulated), flat_parameters(model))


@every_scheme
def test_warm_up_is_exact(scheme):
    """Its steps give what a float32 allreduce gives, bit for bit at the same order of sums."""
    steps, models = 3, []
    for compressed in (True, False):
        model = make_model()
        optimizer = distributed(
            model,
            make(scheme, warmup_steps=steps, seed=next(SEEDS))
            if compressed
            else hvd.Compression.none,
        )
        train(model, optimizer, steps)
        models.append(flat_parameters(model))
    torch.testing.assert_close(*models, rtol=1e-5, atol=1e-6)
    assert_same_everywhere(models[0], "warm")


def test_a_change_between_backward_and_step_holds_for_the_next_one():
    model, compressor = make_model(), ALQ(symmetric=True, seed=next(SEEDS), update_steps=[])
    optimizer, batch, bits = distributed(model, compressor), batches(hvd.rank()), []
    for step in range(3):
        x, y = batch()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        if step == 1:
            compressor.set(bits=6)
            assert compressor.parts.default.table.bits == 3
        optimizer.step()
        bits.append(compressor.report()["bits_per_coordinate"])
    assert [more - bits[0] for more in bits] == pytest.approx([0, 0, 3], rel=0.05)
    assert_same_everywhere(flat_parameters(model), "between")


def test_settings_that_come_back_have_their_names_back():
    """Names that never repeat would overflow Horovod's response cache."""
    model = make_model()
    compressor = QSGD(seed=next(SEEDS), schedule=lambda step: {"bits": 2 + step % 2})
    names = set()
    optimizer = distributed(model, compressor)
    for _ in range(6):
        train(model, optimizer, 1)
        names.add(compressor._training.connection._binding.name)
    assert len(names) == 2
    assert_same_everywhere(flat_parameters(model), "names")


@pytest.mark.parametrize("fault", ["value", "step"])
def test_ranks_that_change_apart_are_told(fault):
    model, compressor = make_model(), ALQ(bits=3, seed=next(SEEDS), update_steps=[])
    optimizer = distributed(model, compressor)
    train(model, optimizer, 1)
    if fault == "value":
        compressor.set(bits=4 if hvd.rank() == 0 else 5)
    elif hvd.rank() == 0:
        compressor.set(bits=4)
    with pytest.raises(RankMismatchError, match="disagree on settings: bits is 4 on rank 0, "):
        train(model, optimizer, 1)
    hvd.barrier()
