"""Whole steps and exchanges of CUDA gradients, where there is no GPU: the CPU's results bit for
bit; hooks wait for nothing, and what comes back is waited for by events alone."""

from __future__ import annotations

import contextlib

import pytest
import torch
import triton_interpreter  # noqa: F401
from fake_gpu import OnGPU, Stream, Waited, off_gpu, on_gpu, pretended, quick  # noqa: F401
from feedback_steps import OneRank, gradients
from parcels import begun, parcel
from scheme_cases import scheme

from hvd_adaptive import QSGD
from hvd_adaptive.base.tensors import HostCopy, taken_over
from hvd_adaptive.exchange.auto import Plain
from hvd_adaptive.exchange.exchange import AllgatherExchange, RankInfo
from hvd_adaptive.exchange.hierarchical import HierarchicalExchange
from hvd_adaptive.exchange.scatter_reduce import ScatterReduceExchange
from hvd_adaptive.run.rank_context import RankContext
from hvd_adaptive.simulate.stages import together

pytestmark = pytest.mark.usefixtures("quick_kernels")

SIZES = [700, 30, 450]
KEYWORDS = {"bucket_size": 128, "min_numel": 100}
EXCHANGES = {
    "allgather": lambda rank: AllgatherExchange(RankInfo(4, rank)),
    "scatter_reduce": lambda rank: ScatterReduceExchange(RankInfo(4, rank)),
    "hierarchical": lambda rank: HierarchicalExchange(RankInfo(4, rank, (0, 0, 1, 1))),
    "plain": lambda rank: Plain(RankInfo(4, rank)),
    "half": lambda rank: Plain(RankInfo(4, rank), torch.bfloat16),
}


class Rank(OneRank):
    """With buffers of its own, and gradients that their average may replace."""

    buffer = RankContext.buffer


def run(rank: Rank, of_step, gpu=None, streams=(), waits=False) -> list[torch.Tensor]:
    """A step; on the GPU each gradient arrives on its own stream, and no hook may wait, unless
    ``waits``."""
    step = rank.begin()
    step.release(1.0)
    for slot, gradient in enumerate(of_step):
        own = gradient.clone() if gpu is None else on_gpu(gradient.clone())
        with contextlib.ExitStack() as stack:
            if gpu is not None:
                stack.enter_context(gpu.waiting() if waits else gpu.never_waiting())
                stack.enter_context(gpu.on(streams[slot] if streams else gpu.stream))
            step.arrive(slot, own)
    step.launch_all(1.0)
    while step.write_next():
        pass
    results = [step.result(slot) for slot in range(len(of_step))]
    step.check_everywhere()
    rank.compressor._training.meter.finish()
    rank.compressor.step += 1
    step.commit()
    return [off_gpu(result) for result in results]


@pytest.mark.parametrize("weight", (None, 0.5, "auto"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
@pytest.mark.parametrize("name", ("qsgd-3", "ecdq-3", "sparse-0.1"))
def test_steps_are_the_cpus(name, weight, dtype, gpu):
    """ECDQ and SparseSGD encode on the host, which waits for it."""
    dtypes, waits = [dtype] * 3, name != "qsgd-3"
    make, gpu.uploads_allowed = scheme(name, error_feedback=weight, **KEYWORDS), waits
    here, there = (Rank(make(), SIZES, dtypes, fusion=512) for _ in range(2))
    assert len(here.layout.groups) > 1
    for number in range(3):
        values = gradients(SIZES, number, dtypes)
        if number == 2 and weight:
            values[0][3] = float("nan")  # AMP skips such a step: residuals stay
        with gpu.waiting() if waits else contextlib.nullcontext():
            found = run(there, values, gpu, waits=waits)
        for a, b in zip(run(here, values), found, strict=True):
            assert torch.equal(a, b) or torch.equal(a.isnan(), b.isnan())
        figures = [rank.compressor.report() for rank in (here, there)]
        assert figures[0]["relative_error"] == figures[1]["relative_error"]
    assert waits or set(gpu.waits[-3:]) == {"an event's synchronize"}
    with gpu.waiting():
        for own, residual in here.residuals().items():
            assert torch.equal(residual, there.residuals()[own])


def test_gradients_of_several_streams_are_waited_for(gpu):
    rank = Rank(QSGD(bits=3, **KEYWORDS), SIZES)
    streams = [Stream(name) for name in "abc"]
    run(rank, gradients(SIZES, 0), gpu, streams)
    assert len(rank.layout.groups) == 1
    # All arrived before the last one, on whose stream the group is encoded.
    assert set(streams[2].waits) == {streams[0], streams[1]}
    assert not streams[0].waits and not streams[1].waits


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_exchanges_are_the_cpus(exchange, gpu):
    codec = scheme("natural" if exchange == "hierarchical" else "qsgd-3", bucket_size=64)()
    flats = [torch.randn(1000, generator=torch.Generator().manual_seed(r)) for r in range(4)]

    def exchanged(device):
        routes = []
        for rank, flat in enumerate(flats):
            way, own = EXCHANGES[exchange](rank), device(flat.clone())
            with gpu.never_waiting():
                routes.append(
                    begun(way.average(parcel(codec.parts.default, own, 900, 0.25), own, own[:900]))
                )
        return together(routes)

    wanted = exchanged(lambda flat: flat)
    result = exchanged(on_gpu)
    assert isinstance(result, OnGPU) and torch.equal(off_gpu(result), wanted)
    assert set(gpu.waits) <= {"an event's synchronize"}


def test_received_tensors_are_taken_over_from_the_default_stream(gpu, monkeypatch):
    recorded = []
    monkeypatch.setattr(OnGPU, "record_stream", lambda self, stream: recorded.append(stream))
    received, other = on_gpu(torch.ones(3)), Stream("other")
    assert taken_over(received) is received and not recorded
    with gpu.on(other):
        taken_over(received)
    assert other.waits == [gpu.default] and recorded == [other]


def test_the_pretended_gpu_notices(gpu):
    """What these tests rely on."""
    tensor, host = on_gpu(torch.ones(3)), torch.empty(3)
    for wait in (
        lambda: tensor.sum().item(),
        lambda: bool(tensor.any()),
        lambda: tensor.cpu(),
        lambda: tensor[tensor > 0],
        lambda: host.copy_(tensor, non_blocking=True),
        lambda: tensor.copy_(host, non_blocking=True),
        lambda: host.to(tensor.device),
        torch.cuda.synchronize,
        lambda: torch.cuda.current_stream().synchronize(),
    ):
        with pytest.raises(Waited):
            wait()
    with pytest.raises(AssertionError, match="on the GPU and on the CPU"):
        tensor + host
    assert torch.equal(HostCopy(tensor).get(), torch.ones(3)) and len(gpu.waits) == 1
