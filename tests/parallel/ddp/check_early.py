"""Groups that are handed over before their bucket is full: when, and that nothing else changes."""

from __future__ import annotations

import gc
import inspect
import logging
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from ddp_oracles import (
    FINE,
    assert_averages,
    assert_same_everywhere,
    assert_trains,
    backward,
    own_gradients,
)
from early_nets import SMALL, STEPS, TOLERANCE, Gated, Halves, deep_net, wrapped
from nets import batch, loss_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hvd_adaptive import ALQ, QSGD
from hvd_adaptive.ddp import compression_hook
from hvd_adaptive.hooks.ddp.early import EarlyGroups

RANK, RANKS = dist.get_rank(), dist.get_world_size()

SCHEMES = {
    "allgather": lambda: QSGD(**FINE | SMALL, exchange="allgather"),
    "scatter_reduce": lambda: QSGD(**FINE | SMALL, exchange="scatter_reduce"),
    "fitted": lambda: ALQ(bits=4, update_steps=(1, 4), samples=4, **SMALL),
    "feedback": lambda: QSGD(**FINE | SMALL, error_feedback=1.0),
}


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_bits_are_the_same(scheme, view, monkeypatch, sent):
    """With early groups, and without: the same payloads travel."""
    runs = []
    for early in (False, True):
        with monkeypatch.context() as patch:
            if not early:
                patch.setattr(EarlyGroups, "begin", lambda self, gradients: None)
            net, found = deep_net(), []
            model, state = wrapped(net, SCHEMES[scheme](), gradient_as_bucket_view=view)
            state.compressor._training.instance.number = 7  # random numbers of both are the same
            for step in range(STEPS):
                backward(model, step)
                found += [p.grad.clone() for p in net.parameters()]
        assert bool(sent) == early
        runs.append(found)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert_same_everywhere(*found)


def test_two_backward_passes(sent):
    """From step 5 on, the first one fills a bucket in part."""
    net, twin = Halves(), Halves()
    model, _ = wrapped(net)
    for step in range(STEPS + 2):
        x, y = batch(step, RANK)
        for of in (twin, model):
            of.zero_grad()
            losses = [nn.functional.cross_entropy(out, y) for out in of(x)]
            del sent[:]
            if step < 5:
                sum(losses).backward()
            else:
                losses[1].backward()
                losses[0].backward()
        assert bool(sent) == (step >= 4)
        assert_averages(net, {name: p.grad for name, p in twin.named_parameters()}, TOLERANCE)


@pytest.mark.parametrize("options", [{}, {"batched_grad_copy": True}], ids=["usual", "batched"])
def test_zero_gradients_prove_nothing(options, sent):
    """Nor do those of a second DDP model, whose hooks run after those that the first one left."""
    if not options.keys() <= inspect.signature(DistributedDataParallel).parameters.keys():
        pytest.skip("this version of torch has no batched_grad_copy")
    net = Gated()
    for is_second in (False, True):
        model, state = wrapped(net, **options)
        for step in range(2 * STEPS):
            net.is_open = step >= STEPS
            own = own_gradients(net, step)
            backward(model, step)
            assert_averages(net, own, TOLERANCE)
        assert not sent
        state.close()
        del model, state
        if not is_second:
            gc.collect()


def test_frozen_parameters(sent):
    """A layer is frozen after DDP was built, and thawed later."""
    net = deep_net()
    model, _ = wrapped(net, find_unused_parameters=True)
    for step in range(2 * STEPS):
        net[2].requires_grad_(step >= STEPS)
        own = own_gradients(net, step)
        if step < STEPS:
            own = {name: g for name, g in own.items() if not name.startswith("2.")}
        backward(model, step)
        if step < STEPS:
            assert net[2].weight.grad is None
        assert_averages(net, own, TOLERANCE)
    assert sent


def trained(sent, named=True):
    """A network, its model and state after steps that have handed groups over early."""
    net = deep_net()
    model, state = wrapped(net, named=named)
    for step in range(5):
        backward(model, step)
    assert sent
    return net, model, state


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, outer):
        raise ArithmeticError("in backward")


@pytest.mark.parametrize("goes_on", ["state", "model"])
def test_a_backward_pass_that_fails(goes_on, sent, caplog):
    """All ranks fail in the middle of a backward pass; the state serves another model, or the model
    gets another state, with the hooks that the first one left."""
    net, model, state = trained(sent, named=goes_on == "model")
    handle = net[0].register_forward_hook(lambda module, args, out: Fails.apply(out))
    with pytest.raises(ArithmeticError):
        backward(model, 5)
    handle.remove()
    if goes_on == "state":
        net = deep_net()
        model = DistributedDataParallel(net, bucket_cap_mb=0.05)
        model.register_comm_hook(state, compression_hook)
        with caplog.at_level(logging.WARNING):
            backward(model, 5)
        assert not caplog.records
        report = state.report()  # what was given up has been sent, too
        assert report["wire_bytes"] > report["payload_bytes"] * (RANKS - 1)
    else:
        state.close()
        del model, state
        gc.collect()  # or the first model's hooks are called, too
        model, state = wrapped(net)
    del sent[:]
    assert_trains(model, net, STEPS, TOLERANCE)
    assert sent


def test_hooks_keep_nothing_alive(sent):
    """A model and its state that nobody holds are freed."""
    net, model, state = trained(sent)
    session = weakref.ref(state.session)
    del model, state
    deadline = time.monotonic() + 10
    while gc.collect() >= 0 and session() is not None and time.monotonic() < deadline:
        time.sleep(0.05)  # a worker that looks for work holds its step meanwhile
    assert session() is None
    loss_of(net, 0, RANK).backward()  # hooks that are left do nothing
