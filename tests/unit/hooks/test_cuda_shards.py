"""FSDP's reduce-scatter of tensors on a GPU, where there is none: the host waits only in finish."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import triton_interpreter  # noqa: F401
from fake_gpu import off_gpu, on_gpu, pretended, quick  # noqa: F401

from hvd_adaptive import ALQ, EDEN, ORQ, QSGD, PayloadError, instances
from hvd_adaptive.hooks.fsdp.modules import ShardedModule
from hvd_adaptive.hooks.fsdp.session import ShardedSession
from hvd_adaptive.transport.torch_world import TorchWorld

pytestmark = pytest.mark.usefixtures("quick_kernels", "alone")

SIZES, STEPS = (700, 1500, 90), 3


def session_of(scheme) -> ShardedSession:
    instances.start_over()
    compressor = (
        scheme(bits=2, bucket_size=128, min_numel=100, update_steps=())
        if scheme is ALQ
        else scheme(bucket_size=128, min_numel=100)
    )
    modules = [ShardedModule(str(size), size, 0) for size in SIZES]
    return ShardedSession(compressor, modules, "test", shards=True)


def step(session: ShardedSession, number: int, gpu=None) -> list[torch.Tensor]:
    """All modules' averages; on the GPU nothing may be waited for, not even an event."""
    draw, averages = torch.Generator().manual_seed(number), []
    for index, size in enumerate(SIZES):
        flat = torch.randn(size, generator=draw)
        flat = flat if gpu is None else on_gpu(flat)
        out = torch.empty_like(flat)
        if gpu is None or not number:  # ranks compare settings in the first call
            session.average(index, flat, out, dist.group.WORLD, 1.0)
        else:
            with gpu.never_waiting():
                session.average(index, flat, out, dist.group.WORLD, 1.0)
        averages.append(off_gpu(out))
    return averages


@pytest.mark.parametrize("scheme", [ALQ, EDEN, QSGD, ORQ])
def test_a_call_waits_for_nothing(gpu, scheme):
    """And averages are the CPU's."""
    session = session_of(scheme)
    wanted = []
    for number in range(STEPS):
        wanted += step(session, number)
        session.finish()
    session, found = session_of(scheme), []
    for number in range(STEPS):
        with gpu.waiting() if not number else gpu.never_waiting():
            found += step(session, number, gpu)
        with gpu.waiting():
            session.finish()
    for own, other in zip(found, wanted, strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize(
    "place, error", [(130, "checksum"), (64, "another step, group or chunk"), (0, "foreign")]
)
def test_what_is_corrupt_raises_in_finish(gpu, monkeypatch, place, error):
    """place: the byte that differs."""
    session = session_of(QSGD)
    alltoall = TorchWorld.alltoall_equal

    def damaged(self, data):
        received = alltoall(self, data)
        off_gpu(received)[place] ^= 1
        return received

    with gpu.waiting():
        step(session, 0, gpu)
        session.finish()
        with monkeypatch.context() as patched:
            patched.setattr(TorchWorld, "alltoall_equal", damaged)
            step(session, 1, gpu)
        with pytest.raises(PayloadError, match="corrupt at rank 0") as raised:
            session.finish()
        assert error in str(raised.value.__cause__)
        step(session, 2, gpu)
        session.finish()
