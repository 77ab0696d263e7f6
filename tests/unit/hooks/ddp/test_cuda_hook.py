"""DDP's hook with buckets on a GPU, where there is none: the host waits for nothing in it."""

from __future__ import annotations

import pytest
import torch
import triton_interpreter  # noqa: F401
from fake_gpu import CUDA, off_gpu, on_gpu, pretended, quick  # noqa: F401

from hvd_adaptive import ALQ, EDEN, QSGD, instances
from hvd_adaptive.ddp import CompressionState
from hvd_adaptive.hooks.ddp.buckets import Bucket, BucketFuture
from hvd_adaptive.run.ordered import WINDOW
from hvd_adaptive.run.ordered_drive import LENGTHS_LAST
from hvd_adaptive.transport.torch_world import TorchWorld

pytestmark = pytest.mark.usefixtures("quick_kernels", "alone")

BUCKETS, SIZE = 3, 700
STEPS = (0, 1, 2, LENGTHS_LAST, LENGTHS_LAST + 1)  # of which two exchange lengths


def averages(gpu=None, scheme=QSGD, **keywords) -> list[torch.Tensor]:
    """All buckets' averages in all steps; on the GPU only ``finish`` may wait.

    With residuals the first bucket of a step may wait for events of the last step.
    """
    instances.start_over()
    compressor = scheme(bits=4, bucket_size=128, min_numel=100, **keywords)
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
            if gpu is None or (compressor._training.residuals is not None and not index):
                session.take(bucket, index)
            else:
                with gpu.never_waiting():
                    session.take(bucket, index)
            found.append(buffer)
        if gpu is None:
            session.finish()
        else:
            with gpu.waiting():
                session.finish()
    return [off_gpu(average) for average in found]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize(("exchange", "weight"), [("allgather", None), ("scatter_reduce", 0.5)])
def test_the_hook_waits_for_nothing(gpu, monkeypatch, backend, exchange, weight):
    """And averages are the CPU's. NCCL has no small arrays on the host."""
    keywords = {"exchange": exchange, "error_feedback": weight}
    wanted = averages(**keywords)
    if backend == "nccl":
        monkeypatch.setattr(TorchWorld, "_device", CUDA)
    for own, other in zip(averages(gpu, **keywords), wanted, strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize("scheme", [ALQ, EDEN])
def test_other_schemes(gpu, scheme):
    for own, other in zip(averages(gpu, scheme), averages(scheme=scheme), strict=True):
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
