"""Ranks that disagree fail together, with a message, before anything is averaged."""

from __future__ import annotations

import itertools

import horovod.torch as hvd
import pytest
import torch
from check_training import distributed
from conftest import assert_same_everywhere, flat_parameters, make_model, train

from hvd_adaptive import ALQ, RankMismatchError

# A seed for each case: sessions of equal settings are numbered, and ranks that fail here differ.
SEEDS = itertools.count(1000)


@pytest.fixture(autouse=True)
def settled():
    """Let the placeholders of a step that failed come to their end before the next test."""
    yield
    hvd.barrier()


@pytest.mark.parametrize(
    "keywords",
    [{"bits": 4}, {"bucket_size": 256}, {"seed": 1}, {"norm": "linf"}, {"update_steps": [1]}],
    ids=str,
)
@pytest.mark.parametrize("held", [True, False], ids=["update", "no_update"])
def test_different_settings(keywords, held):
    model = make_model()
    base = {"seed": next(SEEDS), "update_steps": [0] if held else []}
    if keywords == {"update_steps": [1]} and not held:
        keywords = {"update_steps": [0]}
    compressor = ALQ(**base | keywords) if hvd.rank() == 1 else ALQ(**base)
    optimizer = distributed(model, compressor)
    with pytest.raises(RankMismatchError, match="disagree on settings"):
        train(model, optimizer, 1)


def test_adasum_is_refused():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=ALQ(seed=next(SEEDS)),
        op=hvd.Adasum,
    )
    with pytest.raises(ValueError, match="Adasum"):
        train(model, optimizer, 1)


def test_one_compressor_for_two_optimizers():
    compressor = ALQ(seed=next(SEEDS))
    models = [make_model(1), make_model(2)]
    optimizers = [distributed(model, compressor) for model in models]
    train(models[0], optimizers[0], 1)
    with pytest.raises(RuntimeError, match="one compressor serves one optimizer"):
        train(models[1], optimizers[1], 1)


def test_groups_that_do_not_fit():
    model = make_model()
    optimizer = distributed(model, ALQ(bucket_size=2**20, in_flight_bytes=4096))
    with pytest.raises(ValueError, match="scatter_reduce"):
        train(model, optimizer, 1)


def test_different_steps_and_training_after_them():
    """The step that failed is given up: nothing of it is waited for, or mixed with the next."""
    model = make_model()
    compressor = ALQ(update_steps=[], seed=next(SEEDS))
    optimizer = distributed(model, compressor)
    train(model, optimizer, 1)
    if hvd.rank() == 0:
        compressor.step += 1
    with pytest.raises(RankMismatchError, match="disagree on the step"):
        train(model, optimizer, 1)
    compressor.step = 1
    handles = [handle for handle, _ in optimizer._handles.values()]
    optimizer.load_state_dict(optimizer.state_dict())
    for handle in handles:
        hvd.synchronize(handle)
    hvd.barrier()
    train(model, optimizer, 2)
    assert compressor.step == 3
    assert_same_everywhere(flat_parameters(model), "after mismatch")


def test_a_failing_fit_fails_everywhere():
    """The first rank's exception must not leave the others waiting for its table."""
    model = make_model()
    compressor = ALQ(seed=next(SEEDS), bucket_size=512)
    optimizer = distributed(model, compressor)

    def broken(collected):
        raise FloatingPointError("made to fail")

    compressor.refit = broken
    with pytest.raises(RuntimeError, match="could not fit the level table"):
        train(model, optimizer, 1)
