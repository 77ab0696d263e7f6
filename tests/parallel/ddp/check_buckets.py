"""Steps are known by their parameters: whichever buckets DDP brings, of which model, with which
option, in whichever way; groups that may be handed over before their bucket is full (``sent``)."""

from __future__ import annotations

import inspect
import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from ddp_oracles import (
    FINE,
    assert_averages,
    assert_trains,
    backward,
    make_net,
    own_gradients,
    wrap,
)
from early_nets import STEPS, TOLERANCE, Branches, Checkpointed, Shared, Unused, deep_net, wrapped
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.nn.parallel import DistributedDataParallel

from hvd_adaptive import ALQ, QSGD, Auto, Hierarchical, RankMismatchError, Tuning
from hvd_adaptive.ddp import compression_hook

RANK, RANKS = dist.get_rank(), dist.get_world_size()

NODES = Hierarchical(ranks_per_node=1, second_stage_bits=8)
UNUSED, STATIC = {"find_unused_parameters": True}, {"static_graph": True}
# A model, options of DDP, the compressor's, and whether groups leave early (None: either).
MODELS = {
    "views": (deep_net, {"gradient_as_bucket_view": True}, {}, True),
    "caps": (deep_net, {"bucket_cap_mb_list": [0.02, 0.05, 1.0]}, {}, None),
    # It fills a bucket when all of its gradients are there.
    "late copies": (deep_net, {"batched_grad_copy": True}, {}, False),
    "orders": (Branches, {}, {}, True),
    "orders, feedback": (Branches, {}, {"error_feedback": 1.0}, True),
    # A layer that no rank uses makes its groups wait for DDP; others leave early.
    "unused": (Unused, UNUSED, {}, True),
    # Backward passes within the backward pass bring buckets, too.
    "checkpoints": (lambda: Checkpointed(reentrant=False), {}, {}, None),
    "reentrant": (lambda: Checkpointed(reentrant=True), {}, {}, None),
    "static": (lambda: Checkpointed(reentrant=False), STATIC, {}, None),
    "static, reentrant": (lambda: Checkpointed(reentrant=True), STATIC, {}, None),
    "shared, reentrant": (Shared, STATIC, {}, True),
    "nodes": (deep_net, {}, {"exchange": NODES}, True),
    "one node": (deep_net, {}, {"exchange": "hierarchical"}, True),
    "measured": (deep_net, {}, {"exchange": Auto(second_stage_bits=8)}, None),
    "warm-up": (deep_net, {}, {"warmup_steps": STEPS}, True),
}
EXACT = ("one node", "warm-up")  # nothing is compressed


@pytest.mark.parametrize("model", MODELS)
def test_averages_of_any_model(model, sent):
    make, options, keywords, leaves_early = MODELS[model]
    if not options.keys() <= inspect.signature(DistributedDataParallel).parameters.keys():
        pytest.skip(f"DistributedDataParallel has no {options} in this version of torch")
    net = make()
    ddp, state = wrapped(net, keywords=keywords, **options)
    assert_trains(ddp, net, STEPS, 1e-6 if model in EXACT else TOLERANCE)
    assert state.compressor.step == STEPS
    assert leaves_early in (None, bool(sent))
    if model == "shared, reentrant":  # its gradient is accumulated in two passes
        groups, members = state.session._early._slots_of, state.session._binding.layout.members
        names = {members[slot].name for group in sent for slot in groups[group]}
        assert names and not any(name.startswith("shared") for name in names)


def waiting(state, bucket):
    """Waits for each average before DDP fills the next bucket."""
    done = torch.futures.Future()
    done.set_result(compression_hook(state, bucket).wait() * 2)
    return done


def scaled(state, bucket):
    bucket.buffer().mul_(0.5)
    return compression_hook(state, bucket)


HOOKS = {"waiting": (waiting, 2.0), "scaled": (scaled, 0.5)}


@pytest.mark.parametrize("worker", [True, False])
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_around_ours(name, worker, sent):
    """They may change the bucket, or its average."""
    hook, factor = HOOKS[name]
    net = deep_net()
    compressor = ALQ(**FINE, update_steps=[0, 2], tuning=Tuning(worker=worker))
    model, _ = wrapped(net, compressor, hook=hook)
    assert_trains(model, net, STEPS, TOLERANCE, factor)
    assert name == "waiting" or not sent


def test_a_wrapper_in_16_bits():
    """The bucket that ours receives is float16; so are its averages."""
    net = make_net()
    model, state = wrap(net, hook=fp16_compress_wrapper(compression_hook))
    assert_trains(model, net, 3)
    assert state.compressor.step == 3
    report = state.report()
    assert report["uncompressed_bytes"] == 2 * report["coordinates"]


@pytest.mark.parametrize("static", [False, True])
def test_no_sync_sends_nothing(static, sent):
    """Two backward passes accumulate; groups of the third leave early, with the sum."""
    net = deep_net()
    model, state = wrapped(net, static_graph=static)
    backward(model, 9)  # a static graph must be known before no_sync
    for step in range(1, STEPS):
        model.zero_grad()
        own = [own_gradients(net, 3 * step + part) for part in range(3)]
        for part in range(3):
            del sent[:]
            with nullcontext() if part == 2 else model.no_sync():
                backward(model, 3 * step + part, zero=False)
            assert not sent or (part == 2 and step >= 4)
        assert static or bool(sent) == (step >= 4)
        assert_averages(net, {name: sum(of[name] for of in own) for name in own[0]}, TOLERANCE)
    assert state.compressor.step == STEPS


class Mixed(nn.Module):
    """Layers of float32, then of float64."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(40, 120), nn.Linear(120, 10).double()

    def forward(self, x):
        return self.last(self.first(x).relu().double())


def test_a_static_graph_of_two_dtypes():
    """In the first iteration all buckets have number 0, and none is the last one: they are averaged
    in full precision, and later ones are compressed."""
    torch.manual_seed(0)
    net = Mixed()
    model, state = wrap(net, static_graph=True, bucket_cap_mb=25)
    for step in range(3):
        own = own_gradients(net, step)
        backward(model, step)
        assert_averages(net, own, tolerance=1e-6 if step == 0 else 0.02)
    assert state.compressor.step == 2
    assert state.compressor.report()["bits_per_coordinate"] < 12


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


SKIPPED = UNUSED | {"skip_all_reduce_unused_params": True}


@pytest.mark.parametrize(
    ("used", "worker"), [((1, 2), True), ((0, 1), False), ((1,), True), ((1,), False)]
)
def test_buckets_that_ddp_skips(used, worker):
    """skip_all_reduce_unused_params: the hook is not called for some buckets, the first or the last
    one among them."""
    net = Towers()
    compressor = ALQ(bits=8, bucket_size=128, update_steps=[0, 3], tuning=Tuning(worker=worker))
    model, state = wrap(net, compressor, **SKIPPED)
    for step in range(6):
        net.used = (0, 1, 2) if step in (0, 1, 4) else used
        own = own_gradients(net, step)
        backward(model, step)
        assert_averages(net, own)
        assert state.compressor.step == step + 1


@pytest.mark.timeout(30)
@pytest.mark.parametrize("worker", [True, False])
@pytest.mark.parametrize(("used", "fails_at"), [([(0, 1), (1, 2)], 0), ([(0, 1, 2), (2,)], 3)])
def test_ranks_that_skip_different_buckets(used, fails_at, worker):
    """Refused by the parameters' names, though their collectives have been paired wrongly. The
    compressor then serves another model, in another group of DDP's."""
    net, compressor, group = Towers(), QSGD(**FINE, tuning=Tuning(worker=worker)), dist.new_group()
    model, state = wrap(net, compressor, group=group, **SKIPPED)
    words = rf"step {fails_at}: ranks disagree .*layers\.0\.weight is there on rank 0, missing on"
    with pytest.raises(RankMismatchError, match=words):
        for step in range(4):
            net.used = (0, 1, 2) if step < fails_at else used[RANK > 0]
            backward(model, step)
    assert compressor.step == fails_at
    state.close()
    net = Towers()
    model, _ = wrap(net, compressor)
    assert_trains(model, net, 2)
    assert compressor.step == fails_at + 2


def test_collectives_of_the_program():
    """The program uses the model's group within backward, as the worker uses its own."""
    net = make_net()
    model, state = wrap(net)
    sums = []

    def hook(gradient):
        mine = torch.ones(7) * (1 + RANK)
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

    model, _ = wrap(net, hook=noting)
    for step in range(4):
        futures.clear()
        early.clear()
        backward(model, step)
        assert step < 2 or early == [True]
