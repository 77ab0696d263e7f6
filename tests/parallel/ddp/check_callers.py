"""Who calls the hook, and with which options: wrappers, copies, FSDP1, compiled models, nobody."""

from __future__ import annotations

import copy
import gc
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from ddp_oracles import (
    FINE,
    assert_averages,
    assert_same_everywhere,
    backward,
    make_net,
    mean,
    own_gradients,
    wrap,
)
from doors import *  # noqa: F403
from doors import DIFFERENT, differing
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
    _hook_then_optimizer,
    _OptimizerHookState,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from hvd_adaptive import QSGD, RankMismatchError
from hvd_adaptive.ddp import CompressionState, compression_hook

RANK, RANKS = dist.get_rank(), dist.get_world_size()

UNUSED = "has compressed nothing: register the hook"


def test_composable_replicate():
    """It is set up by its first forward pass."""
    net = make_net()
    model = replicate(net)
    if not hasattr(model, "register_comm_hook"):
        pytest.skip("this version's replicate is of FSDP, and has no hooks of DDP")
    state = CompressionState(QSGD(**FINE), net.named_parameters())
    model.register_comm_hook(state, compression_hook)
    twin = make_net()
    for step in range(3):
        backward(model, step)
        assert_averages(net, own_gradients(twin, step))
    assert state.compressor.step == 3


class Descent:
    """An optimizer of one parameter after the other."""

    def step_param(self, parameter, gradient):
        parameter.data.add_(gradient, alpha=-0.1)


def test_an_optimizer_in_the_hook():
    """It steps as soon as a bucket's average is there, in a callback of the future."""
    nets = [make_net(), make_net()]
    optimizer = torch.optim.SGD(nets[0].parameters(), 0.1)
    hooks = compression_hook, _hook_then_optimizer(compression_hook, _OptimizerHookState(Descent()))
    models = [wrap(net, hook=hook)[0] for net, hook in zip(nets, hooks, strict=True)]
    for step in range(3):
        backward(models[0], step)
        optimizer.step()
        backward(models[1], step)
    for one, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert (one - other).norm() < 0.01 * one.norm()
    assert (nets[1][0].weight - make_net()[0].weight).norm() > 0.01
    assert_same_everywhere(nets[1])


@pytest.mark.parametrize("way", ["copied", "unpickled"])
def test_another_model_needs_the_hook_again(way, said):
    """It trains in float32 until then; its state warns at its end."""
    net = make_net()
    model, state = wrap(net)
    backward(model, 0)
    if way == "copied":
        other, saved = copy.deepcopy(model), copy.deepcopy(state)
    else:
        file = io.BytesIO()
        torch.save((model, state), file)
        file.seek(0)
        other, saved = torch.load(file, weights_only=False)
    backward(other, 1)
    assert saved.compressor.step == 1
    saved.compressor.report()
    assert len(said(UNUSED)) == int(RANK == 0)
    other.register_comm_hook(saved, compression_hook)
    own = own_gradients(other.module, 2)
    backward(other, 2)
    assert_averages(other.module, own)
    assert saved.compressor.step == 2


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("steps", [0, 1])
def test_a_pickled_state_knows_the_names(steps, unused):
    """Patterns of parameter_bits match in the next run, whose model has other first buckets."""
    net = make_net()
    model, state = wrap(net, QSGD(**FINE, parameter_bits={"0.*": None}))
    for _ in range(steps):
        backward(model, 0)
    saved = pickle.loads(pickle.dumps(state))
    model = DistributedDataParallel(net, bucket_cap_mb=0.03, find_unused_parameters=unused)
    model.register_comm_hook(saved, compression_hook)
    for step in (1, 2):
        own = own_gradients(net, step)
        backward(model, step)
        assert_averages(net, own)
        exact = mean(own["0.weight"])
        assert (net[0].weight.grad - exact).norm() < 1e-6 * exact.norm()
    assert saved.compressor.step == steps + 2


@pytest.mark.parametrize("seen", ["report", "state_dict", "end", "called"])
def test_a_hook_that_nobody_registers(seen, said):
    """A warning, once; none if it is called, though a state gets another group later. A state that
    is saved before the first step, as dcp.load does, is no reason."""
    net = make_net()
    model = DistributedDataParallel(net)
    state = CompressionState(QSGD(bits=4), net.named_parameters())
    if seen == "called":
        model.register_comm_hook(state, compression_hook)
    backward(model, 0)
    if seen == "report":
        state.compressor.report()
        state.compressor.report()
    if seen == "state_dict":
        state.state_dict()
        assert not said(UNUSED)
    if seen == "called":
        state.compressor.report()
        state.process_group = dist.new_group()
        backward(model, 1)
    del state, model
    gc.collect()
    assert len(said(UNUSED)) == int(RANK == 0 and seen != "called")


def test_fsdp1():
    """Its hooks get tensors."""
    model = FullyShardedDataParallel(nn.Linear(40, 40), device_id=torch.device("cpu"))
    model.register_comm_hook(CompressionState(QSGD(bits=4)), compression_hook)
    with pytest.raises(ValueError, match=r"FSDP1 is not supported \(use fully_shard"):
        model(torch.ones(2, 40)).sum().backward()


def test_the_python_reducer():
    """It calls hooks inside of compiled code."""
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        model = DistributedDataParallel(nn.Linear(40, 40))
        model.register_comm_hook(CompressionState(QSGD(bits=4)), compression_hook)
        compiled = torch.compile(model, backend="eager")
        with pytest.raises(Exception, match=r"set optimize_ddp to True or False"):
            compiled(torch.ones(2, 40)).sum().backward()


def test_replicas_with_other_names(said):
    """No rank waits for the others' checksums."""
    net = make_net()
    own = "own." if RANK == 0 else ""
    model = DistributedDataParallel(net)
    named = [(own + name, parameter) for name, parameter in net.named_parameters()]
    state = CompressionState(QSGD(**FINE), named)
    model.register_comm_hook(state, compression_hook)
    differing(net, RANK, RANKS, "2.weight")
    with pytest.raises(RankMismatchError, match=r"of this step: own\.0\.weight is there"):
        backward(model, 0)
    assert not said(DIFFERENT)
