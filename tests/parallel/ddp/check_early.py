"""Groups that are handed over before their bucket is full: when, and that nothing else changes."""

from __future__ import annotations

import functools
import gc
import time
import weakref
from contextlib import nullcontext

import ddp_oracles
import pytest
import torch
import torch.distributed as dist
from ddp_oracles import assert_same_everywhere, batch, own_gradients
from ddp_oracles import backward as train
from torch import nn
from torch.utils.checkpoint import checkpoint

from hvd_adaptive import ALQ, QSGD
from hvd_adaptive.ddp import compression_hook
from hvd_adaptive.hooks.ddp.early import EarlyGroups

STEPS, TOLERANCE = 6, 0.05
assert_averages = functools.partial(ddp_oracles.assert_averages, tolerance=TOLERANCE)
assert_trains = functools.partial(ddp_oracles.assert_trains, steps=STEPS, tolerance=TOLERANCE)
# Buckets of several groups of several layers.
wrapped = functools.partial(ddp_oracles.hooked, bucket_cap_mb=0.05)
SMALL = {"bucket_size": 128, "fusion_bytes": 16384}
FINE = {"bits": 8, "norm": "linf"} | SMALL
SCHEMES = {
    "allgather": lambda: QSGD(**FINE, exchange="allgather"),
    "scatter_reduce": lambda: QSGD(**FINE, exchange="scatter_reduce"),
    "fitted": lambda: ALQ(bits=4, update_steps=(1, 4), samples=4, **SMALL),
    "feedback": lambda: QSGD(**FINE, error_feedback=1.0),
}


@pytest.fixture(autouse=True)
def _sent(monkeypatch):
    """The groups of each step that were handed over early."""
    sent: list[int] = []
    send = EarlyGroups._send

    def recorded(early, group):
        sent.append(group)
        send(early, group)

    monkeypatch.setattr(EarlyGroups, "_send", recorded)
    return sent


def deep_net():
    """Several buckets, of several groups each, of several layers."""
    torch.manual_seed(0)
    hidden = [layer for _ in range(24) for layer in (nn.Linear(40, 40), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(40, 10))


def averages_of(scheme, early, monkeypatch, **options):
    """All steps' averages, with or without early groups."""
    with monkeypatch.context() as patch:
        if not early:
            patch.setattr(EarlyGroups, "begin", lambda self, gradients: None)
        net = deep_net()
        model, state = wrapped(net, SCHEMES[scheme](), **options)
        state.compressor._training.instance.number = 7  # random numbers of both runs are the same
        found = []
        for step in range(STEPS):
            train(model, step)
            found += [p.grad.clone() for p in net.parameters()]
    return found


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_bits_are_the_same(scheme, view, monkeypatch, _sent):
    """With early groups, and without: the same payloads travel."""
    late = averages_of(scheme, False, monkeypatch, gradient_as_bucket_view=view)
    assert not _sent
    early = averages_of(scheme, True, monkeypatch, gradient_as_bucket_view=view)
    assert _sent
    assert all(torch.equal(a, b) for a, b in zip(early, late, strict=True))
    assert_same_everywhere(early)


@pytest.mark.parametrize("scheme", ["allgather", "scatter_reduce"])
def test_groups_leave_before_their_bucket(scheme, _sent, monkeypatch):
    """From the fifth step on: DDP builds its buckets in the second one, the fourth one compares."""
    net = deep_net()
    model, state = wrapped(net, SCHEMES[scheme]())
    taken = []
    take = state.session.take
    monkeypatch.setattr(
        state.session, "take", lambda *a, **k: (taken.append(len(_sent)), take(*a, **k))
    )
    for step in range(STEPS):
        own = own_gradients(net, step)
        del taken[:], _sent[:]
        train(model, step)
        assert_averages(net, own)
        assert (taken[-1] > 0) == (step >= 4)
        assert taken[0] == 0
        assert len(set(_sent)) == len(_sent)


class Branches(nn.Module):
    """Two branches, whose gradients arrive in an order that differs between ranks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (nn.Sequential(*(nn.Linear(40, 40) for _ in range(12))) for _ in range(2))
        self.head = nn.Linear(40, 10)

    def forward(self, x, flipped=None):
        flipped = dist.get_rank() % 2 if flipped is None else flipped
        first, second = (self.b, self.a) if flipped else (self.a, self.b)
        y = first(x)
        return self.head(y + second(x))


@pytest.mark.parametrize("scheme", ["allgather", "feedback"])
def test_ranks_may_reach_gradients_in_other_orders(scheme, _sent):
    net = Branches()
    model, _ = wrapped(net, SCHEMES[scheme]())
    assert_trains(model, net)
    assert _sent


def test_no_sync_sends_nothing(_sent):
    """Two backward passes accumulate; groups of the third leave early, with the sum."""
    net = deep_net()
    model, state = wrapped(net, QSGD(**FINE))
    for step in range(STEPS):
        model.zero_grad()
        own = [own_gradients(net, 3 * step + part) for part in range(3)]
        for part in range(3):
            del _sent[:]
            with nullcontext() if part == 2 else model.no_sync():
                x, y = batch(3 * step + part)
                nn.functional.cross_entropy(model(x), y).backward()
            assert bool(_sent) == (part == 2 and step >= 4)
        assert_averages(net, {name: sum(of[name] for of in own) for name in own[0]})
    assert state.compressor.step == STEPS


class Halves(nn.Module):
    """Two networks, whose gradients share buckets."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (
            nn.Sequential(*(nn.Linear(40, 40) for _ in range(13)), nn.Linear(40, 10))
            for _ in range(2)
        )

    def forward(self, x):
        return self.a(x), self.b(x)


def test_two_backward_passes(_sent):
    """From step 5 on, the first one fills a bucket in part. Its groups leave early only once."""
    net, twin = Halves(), Halves()
    model, state = wrapped(net, QSGD(**FINE))
    sent_by_first = []
    for step in range(STEPS + 2):
        x, y = batch(step)
        for of in (twin, model):
            of.zero_grad()
            losses = [nn.functional.cross_entropy(out, y) for out in of(x)]
            del _sent[:]
            if step < 5:
                sum(losses).backward()
            else:
                losses[1].backward()
                sent_by_first.append(list(_sent))
                losses[0].backward()
        assert bool(_sent) == (step >= 4)
        assert_averages(net, {name: p.grad for name, p in twin.named_parameters()})
    again = state.session._early._twice
    assert again
    slots_of = state.session._early._slots_of
    of_model = sent_by_first[1::2]
    assert any(again & set(slots_of[group]) for group in of_model[0])
    assert not any(again & set(slots_of[group]) for groups in of_model[1:] for group in groups)


class Shared(nn.Module):
    """A layer that two reentrant checkpoints use: its gradient is accumulated in two passes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.first = nn.Linear(40, 40), nn.Linear(40, 40)
        self.own, self.last = deep_net()[:-1], nn.Linear(40, 10)

    def forward(self, x):
        x = checkpoint(self.shared, self.first(x), use_reentrant=True)
        x = checkpoint(self.shared, self.own(x), use_reentrant=True)
        return self.last(x)


def test_reentrant_checkpoints(_sent):
    net, twin = Shared(), Shared()
    model, state = wrapped(net, QSGD(**FINE), static_graph=True)
    for step in range(STEPS):
        train(twin, step)
        train(model, step)
        assert_averages(net, {name: p.grad for name, p in twin.named_parameters()})
    groups, members = state.session._early._slots_of, state.session._binding.layout.members
    names = {members[slot].name for group in _sent for slot in groups[group]}
    assert names
    assert not any(name.startswith("shared") for name in names)


def test_unused_parameters(_sent):
    """A layer that no rank uses makes its groups wait for DDP; others leave early."""
    net = deep_net()
    net.append(nn.Linear(40, 40))  # behind the forward pass
    inner = net[:-1]
    net.forward = inner.forward
    model, _ = wrapped(net, QSGD(**FINE), find_unused_parameters=True)
    assert_trains(model, inner)
    assert _sent


def test_a_hook_around_ours_may_change_the_bucket(_sent):
    factor = 0.5

    def scaled(state, bucket):
        bucket.buffer().mul_(factor)
        return compression_hook(state, bucket)

    net = deep_net()
    model, _ = wrapped(net, QSGD(**FINE), hook=scaled)
    for step in range(STEPS):
        own = own_gradients(net, step)
        train(model, step)
        assert_averages(net, {name: factor * g for name, g in own.items()})
    assert not _sent


def test_gradients_that_reach_their_bucket_late(_sent):
    """batched_grad_copy fills a bucket when all of its gradients are there."""
    net = deep_net()
    try:
        model, _ = wrapped(net, QSGD(**FINE), batched_grad_copy=True)
    except TypeError:
        pytest.skip("this version of torch has no batched_grad_copy")
    assert_trains(model, net)
    assert not _sent


class Gated(nn.Module):
    """A network whose middle counts from some step on only: its gradients are zero before."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(20))
        self.last, self.is_open = nn.Linear(40, 10), False

    def forward(self, x):
        y = x
        for layer in self.layers:
            added = layer(y)
            y = y + (added.relu() if self.is_open else added.clamp(max=-1e6) + 1e6)
        return self.last(y)


@pytest.mark.parametrize("options", [{}, {"batched_grad_copy": True}], ids=["usual", "batched"])
def test_zero_gradients_prove_nothing(options, _sent):
    """Nor do those of a second DDP model, whose hooks run after those that the first one left."""
    net = Gated()
    for is_second in (False, True):
        try:
            model, state = wrapped(net, QSGD(**FINE), **options)
        except TypeError:
            pytest.skip("this version of torch has no batched_grad_copy")
        for step in range(2 * STEPS):
            net.is_open = step >= STEPS
            train(model, step)
            own, names = twin_gradients(net, step), [n for n, _ in net.named_parameters()]
            assert_averages(net, dict(zip(names, own, strict=True)))
        assert not _sent
        state.close()
        del model, state
        if not is_second:
            gc.collect()


def twin_gradients(net, step):
    """This rank's own gradients."""
    twin = type(net)()
    twin.load_state_dict(net.state_dict())
    twin.is_open = net.is_open
    train(twin, step)
    return [p.grad for p in twin.parameters()]


def test_frozen_parameters(_sent):
    """A layer is frozen after DDP was built, and thawed later."""
    net = deep_net()
    model, _ = wrapped(net, QSGD(**FINE), find_unused_parameters=True)
    for step in range(2 * STEPS):
        net[2].requires_grad_(step >= STEPS)
        own = own_gradients(net, step)
        if step < STEPS:
            own = {name: g for name, g in own.items() if not name.startswith("2.")}
        train(model, step)
        if step < STEPS:
            assert net[2].weight.grad is None
        assert_averages(net, own)
    assert _sent


def trained(sent):
    """A network, its model and state after steps that have handed groups over early."""
    net = deep_net()
    model, state = wrapped(net, QSGD(**FINE))
    for step in range(5):
        train(model, step)
    assert sent
    return net, model, state


class Fails(torch.autograd.Function):
    """Raise an error in the backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, outer):
        raise ArithmeticError("in backward")


def test_a_backward_pass_that_fails(_sent):
    """All ranks fail in the middle of a backward pass; a new model goes on with what is left."""
    net, model, state = trained(_sent)
    handle = net[0].register_forward_hook(lambda module, args, out: Fails.apply(out))
    with pytest.raises(ArithmeticError):
        train(model, 5)
    handle.remove()
    state.close()
    del model, state, _sent[:]
    gc.collect()  # or the first model's hooks are called, too
    model, _ = wrapped(net, QSGD(**FINE))
    assert_trains(model, net)
    assert _sent


def test_hooks_keep_nothing_alive(_sent):
    """A model and its state that nobody holds are freed."""
    net, model, state = trained(_sent)
    session = weakref.ref(state.session)
    del model, state
    deadline = time.monotonic() + 10
    while gc.collect() >= 0 and session() is not None and time.monotonic() < deadline:
        time.sleep(0.05)  # a worker that looks for work holds its step meanwhile
    assert session() is None
    x, y = batch(0)
    nn.functional.cross_entropy(net(x), y).backward()  # hooks that are left do nothing
