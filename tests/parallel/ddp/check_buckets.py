"""Steps are known by their parameters: whichever buckets DDP brings, in whichever way."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from ddp_oracles import (
    FINE,
    assert_averages,
    assert_trains,
    backward,
    batch,
    hooked,
    make_net,
    own_gradients,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from hvd_adaptive import ALQ, QSGD, RankMismatchError, Tuning
from hvd_adaptive.ddp import compression_hook

RANKS = dist.get_world_size()


def test_a_static_graph_of_two_dtypes():
    """In the first iteration all buckets have number 0, and none is the last one: they are averaged
    in full precision, and later ones are compressed."""
    net = nn.Sequential(nn.Linear(40, 120), nn.ReLU(), ToDouble(), nn.Linear(120, 10).double())
    model, state = hooked(net, static_graph=True, bucket_cap_mb=25)
    for step in range(3):
        x, y = batch(step)
        names = [name for name, _ in net.named_parameters()]
        own = dict(zip(names, gradients_of(net, x, y), strict=True))
        net.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        assert_averages(net, own, tolerance=1e-6 if step == 0 else 0.02)
    assert state.compressor.step == 2
    assert state.compressor.report()["bits_per_coordinate"] < 12


def gradients_of(net, x, y):
    return torch.autograd.grad(nn.functional.cross_entropy(net(x), y), list(net.parameters()))


class ToDouble(nn.Module):
    def forward(self, x):
        return x.double()


class Towers(nn.Module):
    """Three layers of a bucket each; only those named in ``used`` take part."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(40, 250) for _ in range(3))
        self.head = nn.Linear(250, 10)
        self.used = (0, 1, 2)

    def forward(self, x):
        return self.head(sum(self.layers[index](x) for index in self.used))


@pytest.mark.parametrize(
    ("used", "worker"), [((1, 2), True), ((0, 1), False), ((1,), True), ((1,), False)]
)
def test_buckets_that_ddp_skips(used, worker):
    """skip_all_reduce_unused_params: the hook is not called for some buckets, the first or the last
    one among them."""
    net = Towers()
    compressor = ALQ(bits=8, bucket_size=128, update_steps=[0, 3], tuning=Tuning(worker=worker))
    model, state = hooked(
        net, compressor, find_unused_parameters=True, skip_all_reduce_unused_params=True
    )
    for step in range(6):
        net.used = (0, 1, 2) if step in (0, 1, 4) else used
        own = own_gradients(net, step)
        backward(model, step)
        for index in range(3):
            if index not in net.used:
                for name in ("weight", "bias"):
                    own[f"layers.{index}.{name}"] = None
        assert_averages(net, own)
        assert state.compressor.step == step + 1


@pytest.mark.timeout(30)
@pytest.mark.parametrize("worker", [True, False])
@pytest.mark.parametrize(("used", "fails_at"), [([(0, 1), (1, 2)], 0), ([(0, 1, 2), (2,)], 3)])
def test_ranks_that_skip_different_buckets(used, fails_at, worker):
    """Refused by the parameters' names, though their collectives have been paired wrongly. The
    compressor then serves another model, in another group of DDP's."""
    net, compressor, group = Towers(), QSGD(**FINE, tuning=Tuning(worker=worker)), dist.new_group()
    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    model, state = hooked(net, compressor, group=group, **options)
    words = rf"step {fails_at}: ranks disagree .*layers\.0\.weight is there on rank 0, missing on"
    with pytest.raises(RankMismatchError, match=words):
        for step in range(4):
            net.used = (0, 1, 2) if step < fails_at else used[dist.get_rank() > 0]
            backward(model, step)
    assert compressor.step == fails_at
    state.close()
    net = Towers()
    model, _ = hooked(net, compressor)
    assert_trains(model, net, 2)
    assert compressor.step == fails_at + 2


@pytest.mark.parametrize("worker", [True, False])
def test_a_hook_that_waits(worker):
    """A hook around ours waits for each average before DDP fills the next bucket."""

    def waiting(state, bucket):
        done = torch.futures.Future()
        done.set_result(compression_hook(state, bucket).wait() * 2)
        return done

    net = make_net()
    compressor = ALQ(**FINE | {"bits": 8}, update_steps=[0, 2], tuning=Tuning(worker=worker))
    model, _ = hooked(net, compressor, hook=waiting)
    for step in range(5):
        own = own_gradients(net, step)
        backward(model, step)
        for parameter in net.parameters():
            parameter.grad /= 2
        assert_averages(net, own)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant, static):
    """Backward passes within the backward pass bring buckets, too."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make_net()

        def forward(self, x):
            x = x.requires_grad_()  # or reentrant checkpoints have no backward pass
            for layer in self.net:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x

    net = Checkpointed()
    model, state = hooked(net, static_graph=static)
    for step in range(4):
        own = {f"net.{name}": g for name, g in own_gradients(net.net, step).items()}
        backward(model, step)
        assert_averages(net, own)
    assert state.compressor.step == 4


def test_collectives_of_the_program():
    """The program uses the model's group within backward, as the worker uses its own."""
    net = make_net()
    model, state = hooked(net)
    sums = []

    def hook(gradient):
        mine = torch.ones(7) * (1 + dist.get_rank())
        dist.all_reduce(mine)
        sums.append(mine)

    for parameter in net.parameters():
        parameter.register_hook(hook)
    for step in range(4):
        own = own_gradients(net, step)
        sums.clear()  # own_gradients copies parameters, and calls no hooks
        backward(model, step)
        assert_averages(net, own)
        assert all(bool((s == RANKS * (RANKS + 1) / 2).all()) for s in sums) and len(sums) == 7
    assert state.compressor.step == 4


def test_futures_are_set_early():
    """A bucket's future is set when its groups are done, before the last bucket is there."""
    net, futures, early = make_net(), [], []

    def noting(state, bucket):
        # DDP builds its buckets anew after the first step.
        if step >= 2 and bucket.is_last():
            end = time.monotonic() + 10
            while not futures[0].done() and time.monotonic() < end:
                time.sleep(0.001)
            early.append(futures[0].done())
        futures.append(compression_hook(state, bucket))
        return futures[-1]

    model, _ = hooked(net, hook=noting)
    for step in range(4):
        futures.clear()
        early.clear()
        backward(model, step)
        assert step < 2 or early == [True]
