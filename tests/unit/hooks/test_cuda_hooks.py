"""Hooks of DDP and FSDP with tensors on a GPU, where there is none: the host waits for nothing in
them."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import triton_interpreter  # noqa: F401
from fake_gpu import CUDA, off_gpu, on_gpu, pretended, quick  # noqa: F401
from scheme_cases import scheme

from hvd_adaptive import QSGD, PayloadError, instances
from hvd_adaptive.ddp import CompressionState
from hvd_adaptive.hooks.ddp.buckets import Bucket, BucketFuture
from hvd_adaptive.hooks.fsdp.modules import ShardedModule
from hvd_adaptive.hooks.fsdp.session import ShardedSession
from hvd_adaptive.run.ordered import WINDOW
from hvd_adaptive.run.ordered_drive import LENGTHS_LAST
from hvd_adaptive.transport.torch_world import TorchWorld

pytestmark = pytest.mark.usefixtures("quick_kernels", "alone")

BUCKETS, SIZE = 3, 700
STEPS = (0, 1, 2, LENGTHS_LAST, LENGTHS_LAST + 1)  # of which two exchange lengths


def on(gpu, waits: bool):
    """On the GPU the host may wait, or not even for an event."""
    if gpu is None:
        return nullcontext()
    return gpu.waiting() if waits else gpu.never_waiting()


def averages(gpu=None, name="qsgd-4", **keywords) -> list[torch.Tensor]:
    """All buckets' averages in all steps; on the GPU only ``finish`` may wait.

    With residuals the first bucket of a step may wait for events of the last step.
    """
    instances.start_over()
    compressor = scheme(name)(bucket_size=128, min_numel=100, **keywords)
    session = CompressionState(compressor).session
    parameters = [torch.nn.Parameter(torch.zeros(SIZE)) for _ in range(BUCKETS)]
    found = []
    for step in STEPS:
        compressor.step = step
        draw = torch.Generator().manual_seed(step)
        for index, parameter in enumerate(parameters):
            buffer = torch.randn(SIZE, generator=draw)
            buffer = buffer if gpu is None else on_gpu(buffer)
            bucket = Bucket(buffer, [parameter], [buffer.view(SIZE)], BucketFuture())
            follows = compressor._training.residuals is not None and not index
            with nullcontext() if follows else on(gpu, waits=False):
                session.take(bucket, index)
            found.append(buffer)
        with on(gpu, waits=True):
            session.finish()
    return [off_gpu(average) for average in found]


@pytest.mark.parametrize(
    ("backend", "keywords"),
    [
        *(
            (backend, keywords)
            for backend in ("gloo", "nccl")
            for keywords in ({}, {"exchange": "scatter_reduce", "error_feedback": 0.5})
        ),
        ("gloo", {"name": "alq-4"}),
        ("gloo", {"name": "eden-4"}),
    ],
    ids=str,
)
def test_the_hook_waits_for_nothing(gpu, monkeypatch, backend, keywords):
    """And averages are the CPU's. NCCL has no small arrays on the host."""
    wanted = averages(**keywords)
    if backend == "nccl":
        monkeypatch.setattr("hvd_adaptive.transport.torch_world._device_of", lambda group: CUDA)
    for own, other in zip(averages(gpu, **keywords), wanted, strict=True):
        assert torch.equal(own, other)


def test_the_hook_sends_all_groups(gpu):
    """In the backward pass, though none is received: not only as many as a course's window."""
    compressor = QSGD(bits=4, bucket_size=128, min_numel=100, fusion_bytes=4 * 768)
    session = CompressionState(compressor).session
    parameters = [torch.nn.Parameter(torch.zeros(SIZE)) for _ in range(2 * WINDOW)]
    for step in range(3):
        for index, parameter in enumerate(parameters):
            buffer = on_gpu(torch.randn(SIZE))
            session.take(Bucket(buffer, [parameter], [buffer.view(SIZE)], BucketFuture()), index)
        if step:
            groups = session._driver.drive.step.layout.groups
            assert len(session._driver.drive.step.names) == len(groups) > WINDOW
        with gpu.waiting():
            session.finish()


# FSDP's reduce-scatters.
SIZES = (700, 1500, 90)


def session_of(name: str) -> ShardedSession:
    instances.start_over()
    compressor = scheme(name)(bucket_size=128, min_numel=100)
    modules = [ShardedModule(str(size), size, 0) for size in SIZES]
    return ShardedSession(compressor, modules, "test", shards=True)


def sharded_step(session: ShardedSession, number: int, gpu=None) -> list[torch.Tensor]:
    """All modules' averages; on the GPU nothing may be waited for, not even an event."""
    draw, averages = torch.Generator().manual_seed(number), []
    for index, size in enumerate(SIZES):
        flat = torch.randn(size, generator=draw)
        flat = flat if gpu is None else on_gpu(flat)
        out = torch.empty_like(flat)
        with on(gpu, waits=not number):  # ranks compare settings in the first call
            session.average(index, flat, out, dist.group.WORLD, 1.0)
        averages.append(off_gpu(out))
    return averages


@pytest.mark.parametrize("name", ["alq-2", "eden-2", "qsgd-4", "orq-9"])
def test_a_call_waits_for_nothing(gpu, name):
    """And averages are the CPU's."""
    wanted, found = [], []
    for device, averages in ((None, wanted), (gpu, found)):
        session = session_of(name)
        for number in range(3):
            averages += sharded_step(session, number, device)
            with on(device, waits=True):
                session.finish()
    for own, other in zip(found, wanted, strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize(
    "place, error", [(130, "checksum"), (64, "another step, group or chunk"), (0, "foreign")]
)
def test_what_is_corrupt_raises_in_finish(gpu, monkeypatch, place, error):
    """place: the byte that differs."""
    session = session_of("qsgd-4")
    alltoall = TorchWorld.alltoall_equal

    def damaged(self, data):
        received = alltoall(self, data)
        off_gpu(received)[place] ^= 1
        return received

    with gpu.waiting():
        sharded_step(session, 0, gpu)
        session.finish()
        with monkeypatch.context() as patched:
            patched.setattr(TorchWorld, "alltoall_equal", damaged)
            sharded_step(session, 1, gpu)
        with pytest.raises(PayloadError, match="corrupt at rank 0") as raised:
            session.finish()
        assert error in str(raised.value.__cause__)
        sharded_step(session, 2, gpu)
        session.finish()
