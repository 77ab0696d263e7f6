"""exchange="scatter_reduce" inside stock hvd.DistributedOptimizer."""

from __future__ import annotations

import itertools

import horovod.torch as hvd
import pytest
import torch
from conftest import assert_same_everywhere, batches, make_model, train
from rank_optimizers import distributed

from hvd_adaptive import ALQ, QSGD, ScatterReduce

pytestmark = pytest.mark.ranks

SEEDS = itertools.count(3000)


def reduced(model, optimizer, rank=None):
    """Gradients of one step of this rank's (or another's) first batch, reduced; in one vector."""
    x, y = batches(hvd.rank() if rank is None else rank)()
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.synchronize()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize(
    "options", [{}, {"op": hvd.Sum}, {"gradient_predivide_factor": 2.0}], ids=str
)
def test_close_to_the_exact_average(options):
    """Twice 8 bits; full precision after 8 bits is closer; the small tensors are exact."""
    model = make_model()
    named = [(f"exact.{next(SEEDS)}.{n}", p) for n, p in model.named_parameters()]
    exact = reduced(
        model,
        hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=named, **options
        ),
    )
    errors = []
    for bits in (8, 32):
        model = make_model()
        compressor = QSGD(
            bits=8,
            norm="linf",
            bucket_size=512,
            exchange=ScatterReduce(second_stage_bits=bits),
            seed=next(SEEDS),
        )
        found = reduced(model, distributed(model, compressor, **options))
        assert_same_everywhere(found, f"exact.{bits}")
        errors.append(float((found - exact).square().sum() / exact.square().sum()))
        place = 0
        for p in model.parameters():
            if p.numel() < 1024:
                want = exact[place : place + p.numel()].view(p.shape)
                torch.testing.assert_close(p.grad, want, rtol=1e-5, atol=1e-7)
            place += p.numel()
    assert 0 < errors[1] < errors[0] < 1e-3


def test_as_many_bytes_as_are_sent(monkeypatch):
    """What Horovod's alltoall and allgather were given, less what stays here."""
    model, compressor = make_model(), ALQ(exchange="scatter_reduce", seed=next(SEEDS))
    optimizer, sent = distributed(model, compressor), []
    alltoall, allgather = hvd.alltoall_async, hvd.allgather_async

    def counted_alltoall(tensor, splits, **k):
        sent.append(tensor.numel() - int(splits[hvd.rank()]))
        return alltoall(tensor, splits, **k)

    def counted_allgather(tensor, **k):
        if tensor.dtype == torch.uint8:  # a payload, not what ranks tell each other at the end
            sent.append(tensor.numel() * (hvd.size() - 1))
        return allgather(tensor, **k)

    train(model, optimizer, 2)
    monkeypatch.setattr(hvd, "alltoall_async", counted_alltoall)
    monkeypatch.setattr(hvd, "allgather_async", counted_allgather)
    train(model, optimizer, 1)
    report = compressor.report()
    assert report["wire_bytes"] == sum(sent) > 0
    coordinates = sum(p.numel() for p in model.parameters())
    assert report["coordinates"] == coordinates
    second = compressor.parts.default.second_stage(hvd.size()).bits
    both = coordinates * (3 + second) / 8 * (hvd.size() - 1) / hvd.size()
    assert report["wire_bytes"] == pytest.approx(both, rel=0.25)


def test_among_the_ranks_of_a_process_set():
    members = list(range(1, hvd.size()))
    try:
        process_set = hvd.add_process_set(hvd.ProcessSet(members))
    except (ValueError, RuntimeError) as error:
        pytest.skip(f"process sets cannot be made: {error}")
    if hvd.rank() in members:
        model = make_model()
        compressor = QSGD(bits=8, norm="linf", exchange="scatter_reduce", bucket_size=512)
        optimizer = distributed(model, compressor, process_set=process_set)
        found = reduced(model, optimizer, rank=7)
        x, y = batches(7)()
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
    hvd.barrier()
    if hvd.rank() in members and len(members) > 1:
        exact = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        assert float((found - exact).square().sum() / exact.square().sum()) < 1e-3
    hvd.barrier()
    hvd.remove_process_set(process_set)
