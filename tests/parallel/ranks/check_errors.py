"""Ranks that disagree fail together, with a message, before anything is averaged."""

from __future__ import annotations

import itertools

import horovod.torch as hvd
import pytest
import torch
from conftest import assert_same_everywhere, flat_parameters, make_model, train
from rank_optimizers import distributed, give_up

from hvd_adaptive import ALQ, ECDQ, Hierarchical, RankMismatchError, Tuning

# A seed for each case: sessions of equal settings are numbered, and ranks that fail here differ.
SEEDS = itertools.count(1000)


@pytest.fixture(autouse=True)
def settled():
    """Let the placeholders of a step that failed come to their end before the next test."""
    yield
    hvd.barrier()


@pytest.mark.parametrize("due", [True, False])
@pytest.mark.parametrize("exchange", ["allgather", "scatter_reduce"])
def test_different_update_steps(exchange, due):
    """Tables of averages are due on all ranks at the first step of a scatter-reduce."""
    model = make_model()
    own = due == (hvd.rank() == 1)
    compressor = ALQ(seed=next(SEEDS), update_steps=[0] if own else [], exchange=exchange)
    optimizer = distributed(model, compressor)
    on = [rank for rank in range(hvd.size()) if due == (rank == 1)]
    with pytest.raises(RankMismatchError, match=r"update_steps\) is (not )?due on rank") as caught:
        train(model, optimizer, 1)
    assert f" due on rank{'s' * (len(on) > 1)} {on[0]}" in str(caught.value)


@pytest.mark.parametrize("keywords", [{}, {"exchange": Hierarchical(ranks_per_node=2)}])
def test_update_steps_that_will_differ(keywords):
    """From the first step on that only some ranks sample for a fit; in a node, that is a
    collective."""
    model, last = make_model(), 30 if hvd.rank() == 1 else 9
    compressor = ALQ(seed=next(SEEDS), update_steps=[last], **keywords)
    optimizer = distributed(model, compressor)
    train(model, optimizer, 2)
    told = r"samples for a fit is due on ranks? 0(, 2-3)?, not due on rank 1"
    with pytest.raises(RankMismatchError, match=told):
        train(model, optimizer, 1)


@pytest.mark.parametrize("scheme", [ALQ, ECDQ])
def test_a_class_is_refused(scheme):
    """``compression=ALQ``, at the first gradient, or without an optimizer."""
    model = make_model()
    optimizer = distributed(model, scheme)
    told = rf"compression={scheme.__name__}: pass an instance, {scheme.__name__}\(\)"
    with pytest.raises(ValueError, match=told):
        train(model, optimizer, 1)
    assert not optimizer._handles, "nothing was sent"
    with pytest.raises(ValueError, match=told):
        hvd.allreduce(torch.ones(9), compression=scheme, name="by class")


def test_groups_that_do_not_fit():
    model = make_model()
    optimizer = distributed(model, ALQ(bucket_size=2**20, tuning=Tuning(in_flight_bytes=4096)))
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
    told = r"disagree on the step: its number is 2 on rank 0, 1 on ranks? 1"
    with pytest.raises(RankMismatchError, match=told):
        train(model, optimizer, 1)
    compressor.step = 1
    give_up(optimizer)
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

    compressor.parts.default.refit = broken
    with pytest.raises(RuntimeError, match="could not fit the level table"):
        train(model, optimizer, 1)
