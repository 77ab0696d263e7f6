"""The hook in training: residuals, kinds of gradients, errors, saved states, memory."""

from __future__ import annotations

import copy
import gc
import time
import weakref

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
    wrap,
)
from feedback_doors import *  # noqa: F403
from torch import nn

from hvd_adaptive import ALQ, QSGD, LocalSGD, RankMismatchError, Tuning, average
from hvd_adaptive.ddp import CompressionState, compression_hook
from hvd_adaptive.run import driver
from hvd_adaptive.run.driver import FIND_IT
from hvd_adaptive.run.ordered import WINDOW
from hvd_adaptive.transport.torch_world import TorchWorld

RANK, RANKS = dist.get_rank(), dist.get_world_size()


def test_settings_change_while_training():
    """A schedule's bits hold from its step on, and buckets are laid out anew."""
    net, bits = make_net(), []
    model, state = wrap(net, QSGD(bits=3, schedule={2: {"bits": 6}}.get), bucket_cap_mb=0.05)
    for step in range(5):
        if step == 4:
            state.compressor.set(bits=8)
        backward(model, step)
        bits.append(round(state.compressor.report()["bits_per_coordinate"]))
    assert [b - bits[0] for b in bits] == [0, 0, 3, 3, 5]
    report = state.report()
    assert report["wire_bytes"] == report["payload_bytes"] * (RANKS - 1)
    binding = state.session._binding
    sizes = binding.stock_sizes(binding.layout)  # as a monitor compares
    assert len(sizes) > 1 and sum(sizes) == sum(p.numel() for p in net.parameters())
    assert_same_everywhere(*(p.grad for p in net.parameters()))


class Mixed(nn.Module):
    """Sparse, float64, complex and channels-last parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table = nn.EmbeddingBag(50, 40, sparse=True, mode="sum")
        self.wide = nn.Parameter(torch.randn(40, 40, dtype=torch.float64))
        self.phases = nn.Parameter(torch.randn(40, dtype=torch.complex64))
        self.image = nn.Conv2d(4, 32, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.table(words).double() @ self.wide
        x = (x * self.phases).abs().float()
        return self.image(x.view(-1, 4, 2, 5)).square().mean()


def dense(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.to_dense() if gradient.is_sparse else gradient
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def test_kinds_of_gradients():
    """Sparse ones are averaged as they are, the others, float64 and strided ones, too, compressed
    where they are large enough."""
    net, copy = Mixed(), Mixed()
    model, state = wrap(net, QSGD(bits=8, norm="linf", bucket_size=64))
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + RANK)
        words = torch.randint(50, (6, 3), generator=generator)
        for of in (model, copy):
            of.zero_grad()
            of(words).backward()
        for (name, parameter), own in zip(net.named_parameters(), copy.parameters(), strict=True):
            wanted = mean(dense(own.grad))
            exact = name in ("table.weight", "phases", "image.bias")  # these are too small
            error = float((dense(parameter.grad) - wanted).norm() / wanted.norm())
            assert error < 1e-6 if exact else 1e-4 < error < 0.03, (name, error)
            assert parameter.grad.stride() == own.grad.stride()
    assert state.compressor.report()["coordinates"] == 40 * 40 + 2 * 40 + 32 * 4 * 9 + 32


def test_uneven_inputs_in_join():
    """Ranks that run out of data count as zeros."""
    net = make_net()
    model, state = wrap(net, QSGD(bits=4, warmup_steps=100), bucket_cap_mb=0.05)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with model.join():
        for step in range(2 + (RANK == 0)):
            backward(model, step)
            optimizer.step()
    assert state.compressor.step == 3


@pytest.mark.parametrize("kind", ["settings", "step", "update"])
def test_ranks_that_differ_are_told(kind):
    """All of them, in the same words, and none waits for the others."""
    first, net, group = RANK == 0, make_net(), dist.new_group()
    compressor = QSGD(bits=5 if kind == "settings" and not first else 4)
    if kind == "update":
        compressor = ALQ(bits=3, update_steps=[0, 2] if first else [0, 3])
    model, _ = wrap(net, compressor, group=group, bucket_cap_mb=0.05)
    words = {"settings": "bits is 4 on", "step": "its number is", "update": "a fit of tables"}
    with pytest.raises(RankMismatchError, match=words[kind]):
        for step in range(4):
            if kind == "step" and step == 2 and first:
                compressor.load_state_dict(compressor.state_dict() | {"step": 7})
            backward(model, step)
    reached = {"settings": 0, "step": 7 if first else 2, "update": 2}
    assert compressor.step == reached[kind]


def steps_of(door, compressor, group):
    """Yield before each step of a door."""
    net = make_net()
    if door == "ddp":
        model, _ = wrap(net, compressor, group=group)
    elif door == "local":
        descent = torch.optim.SGD(net.parameters(), lr=0.1)
        local = LocalSGD(descent, every=1, compression=compressor, process_group=group)
    for step in range(4):
        yield step
        if door == "average":
            average([torch.ones(5000)], compressor, group=group)
            continue
        backward(model if door == "ddp" else net, step)
        if door == "local":
            local.step()


@pytest.mark.skipif(RANKS < 2, reason="one rank differs from nobody")
@pytest.mark.timeout(30)
@pytest.mark.parametrize("worker", [True, False])
@pytest.mark.parametrize("door", ["ddp", "average", "local"])
def test_one_rank_alone_changes_a_setting(door, worker):
    """All ranks name the keyword and its values, and none waits for the others."""
    compressor = QSGD(bits=3, fusion_bytes=40_000, tuning=Tuning(worker=worker))
    with pytest.raises(
        RankMismatchError, match=r"disagree on settings: bits is 3 on ranks? 0.*, 4 "
    ):
        for step in steps_of(door, compressor, dist.new_group()):
            if step == 2 and RANK == RANKS - 1:
                compressor.set(bits=4)
    assert compressor.step == 2


# How each door's words begin and end.
WAITS = {
    "ddp": ("rank {} still waits for other ranks: step 2, attempt 0: ", f"\n{FIND_IT}"),
    "average": ("rank {} still waits for other ranks to call average()", f"\n{FIND_IT}"),
    "local": ("LocalSGD: rank {} still waits for other ranks to end round 2: ", "line is late"),
}


@pytest.mark.skipif(RANKS < 2, reason="one rank waits for nobody")
@pytest.mark.parametrize("door", WAITS)
def test_ranks_that_wait_say_so(door, monkeypatch, said):
    """Again and again, and how to find the one that is missing, which is silent."""
    late = RANK == 0
    for step in steps_of(door, QSGD(bits=4), dist.new_group()):
        monkeypatch.setattr(driver, "STALL", 0.3 if step == 2 else 60.0)
        time.sleep(1.0 if late and step == 2 else 0.0)
    told = said("still waits")
    assert not told if late else len(told) >= 2
    begin, end = WAITS[door]
    assert all(m.startswith(begin.format(RANK)) and m.endswith(end) for m in told)


def test_a_state_of_two_models():
    """Without names, a state mistakes the parameters of one for the other's."""
    net = make_net()
    one, state = wrap(net, named=False)
    other = nn.parallel.DistributedDataParallel(make_net(1))
    other.register_comm_hook(state, compression_hook)
    backward(one, 0)
    backward(other, 0)  # as if a new model had replaced the first one
    with pytest.raises(RuntimeError, match="serves two models in turn"):
        backward(one, 1)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_that_changes_its_dtype(dtype, named):
    """It is wrapped anew, and keeps its state and residuals."""
    net = make_net()
    _, state = wrap(net, QSGD(**FINE, error_feedback=0.5), named)
    for kind in (torch.float32, dtype):
        model = nn.parallel.DistributedDataParallel(net.to(kind), bucket_cap_mb=0.05)
        model.register_comm_hook(state, compression_hook)
        for step in range(3):
            batch, twin = torch.ones(4, 40, dtype=kind) * (RANK + step + 1), copy.deepcopy(net)
            for one in (twin, model):
                one.zero_grad()
                one(batch).square().mean().backward()
            own = {name: parameter.grad for name, parameter in twin.named_parameters()}
            assert_averages(net, own, tolerance=0.03)
        assert all(p.grad.dtype == kind for p in net.parameters())
    assert state.compressor.step == 6
    assert len(state.compressor.state_dict()["residuals"]["parameters"]) == 4


def test_messages_of_any_lengths():
    """Lengths that grow, shrink, vanish and differ between ranks; every rank compares what it got
    with what the others must have sent."""
    world = TorchWorld()
    for turn, factor in enumerate((1, 1, 3, 0, 50, 2)):

        def message(sender, receiver, turn=turn, factor=factor):
            size = factor * (7 + 5 * sender + 3 * receiver * (turn % 2))
            generator = torch.Generator().manual_seed(100 * turn + 10 * sender + receiver)
            return torch.randint(256, (size,), dtype=torch.uint8, generator=generator)

        if turn == 5:
            world.forget_lengths()
        own = [message(RANK, other) for other in range(RANKS)]
        splits = torch.tensor([part.numel() for part in own], dtype=torch.int32)
        to_all = world.alltoall(torch.cat(own), splits, "some")
        gather = world.allgather(message(RANK, 0), "all")
        for handle, receiver in ((to_all, RANK), (gather, 0)):
            for sender, part in enumerate(world.synchronize(handle)):
                assert torch.equal(part, message(sender, receiver)), (turn, sender)


@pytest.mark.parametrize("exchange", ["allgather", "scatter_reduce"])
def test_payloads_are_freed_with_their_group(exchange, monkeypatch):
    """What a group has received is freed with the group, not with its step."""
    sent: list[weakref.ref] = []
    received: list[weakref.ref] = []
    alive_at_most = 0

    def alive(known: list[weakref.ref]) -> int:
        return sum(find() is not None for find in known)

    def watched(submit):
        def submitted(self, data, *arguments):
            nonlocal alive_at_most
            handle = submit(self, data, *arguments)
            sent.append(weakref.ref(data))
            received.append(weakref.ref(handle))
            alive_at_most = max(alive_at_most, alive(sent), alive(received))
            return handle

        return submitted

    compressor = QSGD(bits=4, bucket_size=128, fusion_bytes=20_000, exchange=exchange)
    model, _ = wrap(make_net(), compressor)
    for step in range(3):
        backward(model, step)
    for kind in ("allgather", "alltoall"):
        monkeypatch.setattr(TorchWorld, kind, watched(getattr(TorchWorld, kind)))
    gc.disable()  # no cycle may keep them
    try:
        backward(model, 3)
    finally:
        gc.enable()
    assert len(received) > 2 * WINDOW
    assert alive_at_most <= WINDOW
    assert not alive(sent) and not alive(received)


def test_a_forgotten_process_group():
    """Averages would be those of all ranks."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    group, net = groups[dist.get_rank()], nn.Linear(64, 64)
    model = nn.parallel.DistributedDataParallel(net, process_group=group)
    state = CompressionState(QSGD(bits=8), net.named_parameters())
    model.register_comm_hook(state, compression_hook)
    told = rf"process_group: .* over ranks 0-{RANKS - 1}.* over rank {dist.get_rank()}: give"
    with pytest.raises(ValueError, match=told):
        model(torch.ones(2, 64)).sum().backward()
    state.close()
