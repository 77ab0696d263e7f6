"""exchange="scatter_reduce" inside stock hvd.DistributedOptimizer."""

from __future__ import annotations

import itertools
import logging

import horovod.torch as hvd
import pytest
import torch
from conftest import assert_same_everywhere, batches, flat_parameters, make_model, train
from scheme_cases import scheme

from hvd_adaptive import ALQ, QSGD, PayloadError, ScatterReduce, Tuning, instances, simulate
from hvd_adaptive.coding.header import SIZE
from hvd_adaptive.transport.collectives import AllGather, AllToAll

SEEDS = itertools.count(3000)


def coarse() -> QSGD:
    """Averages of b bits have b steps only: 8 bits, and more would be worth it."""
    compressor = QSGD(bits=5, norm="linf", exchange="scatter_reduce", seed=next(SEEDS))
    compressor.parts.default.second_codec = lambda bits: (
        QSGD(intervals=bits, norm="linf").parts.default
    )
    return compressor


def distributed(model, compressor, lr=0.3, **keywords):
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=compressor,
        **keywords,
    )


CASES = {
    "alq": scheme("alq-3", bucket_size=1024, update_steps=[0, 3]),
    "alq-never": scheme("alq-3", bucket_size=512, update_steps=[]),
    "amq-parts": scheme(
        "amq-3", bucket_size=256, parameter_bits={"0.weight": 4}, fusion_bytes=30_000
    ),
    "alq-tensor": scheme("alq-4", bucket_size=500, scope="tensor", tail="full"),
    "qsgd-window": scheme(
        "qsgd-4", bucket_size=128, fusion_bytes=20_000, tuning=Tuning(in_flight_bytes=60_000)
    ),
    "orq": scheme("orq-5", bucket_size=1024, warmup_steps=2),
    "sparse": scheme("sparse-0.1", bucket_size=2048, error_feedback=0.05),
    "terngrad": scheme("terngrad", bucket_size=1024, error_feedback=0.3),
    "natural-one-bucket": scheme("natural", bucket_size=2**20),
    "full": scheme("qsgd-3", bucket_size=256, exchange=ScatterReduce(second_stage_bits=32)),
}


@pytest.mark.parametrize("name", CASES)
def test_equal_replicas_and_the_same_bits_as_simulated(name):
    """Six steps, an update among them; the simulation runs all ranks here and ends with the same
    parameters and tables."""
    steps = 6
    model, compressor = make_model(), CASES[name](exchange="scatter_reduce")
    optimizer, own = distributed(model, compressor), batches(hvd.rank())
    for _ in range(steps):
        x, y = own()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert_same_everywhere(flat_parameters(model), name)

    sources = [batches(rank) for rank in range(hvd.size())]
    simulated, other = make_model(), CASES[name](exchange="scatter_reduce")
    simulate.train(
        simulated,
        lambda rank, step: sources[rank](),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.9),
        compressor=other,
        workers=hvd.size(),
        steps=steps,
        progress=False,
    )
    assert torch.equal(flat_parameters(simulated), flat_parameters(model))
    for label, codec in compressor.parts.items():
        second = codec.second
        if second is not None and hasattr(second.codec, "levels"):
            twin = other.parts[label].second
            assert second.bits == twin.bits
            assert torch.equal(second.codec.levels, twin.codec.levels), label


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


@pytest.mark.parametrize("stage", [AllToAll, AllGather])
def test_a_corrupt_payload_fails_on_all_ranks(stage, monkeypatch):
    """Rank 0's bytes for the last rank are damaged; no rank hangs or goes on."""
    model, compressor = make_model(), QSGD(exchange="scatter_reduce", seed=next(SEEDS))
    optimizer = distributed(model, compressor)
    train(model, optimizer, 1)
    submit = stage.submit

    def damaged(self, world, name):
        if world.rank == 0:
            (self.data if stage is AllGather else self.parts[-1]).bytes[SIZE + 5] ^= 16
        return submit(self, world, name)

    monkeypatch.setattr(stage, "submit", damaged)
    with pytest.raises(PayloadError, match="corrupt"):
        train(model, optimizer, 1)
    hvd.barrier()


def test_a_bucket_that_is_not_finite_is_so_everywhere():
    model = torch.nn.Linear(64, 64, bias=False)
    compressor = ALQ(bucket_size=256, exchange="scatter_reduce", seed=next(SEEDS))
    optimizer = distributed(model, compressor)
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(hvd.rank()))
    if hvd.rank() == hvd.size() - 1:
        weight[40, 3], weight[4, 0] = torch.inf, torch.nan
    (model.weight * weight).sum().backward()
    optimizer.synchronize()
    bad = model.weight.grad.reshape(-1, 256).isnan()
    assert bad[[1, 10]].all() and bad.sum() == 512
    assert_same_everywhere(model.weight.grad.nan_to_num(7.0), "nan")


def test_mixed_dtypes_and_tiny_models():
    """Fewer buckets than ranks, no quantised coordinate at all, half and double precision."""
    parameters = {
        "tiny": torch.nn.Parameter(torch.ones(3)),
        "half": torch.nn.Parameter(torch.ones(700, dtype=torch.float16)),
        "double": torch.nn.Parameter(torch.ones(40, 50, dtype=torch.float64)),
        "brain": torch.nn.Parameter(torch.ones(1030, dtype=torch.bfloat16)),
        "brain.small": torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16)),
    }
    compressor = QSGD(
        bits=8, norm="linf", bucket_size=512, min_numel=600, exchange="scatter_reduce"
    )
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters.values(), lr=1.0),
        named_parameters=list(parameters.items()),
        compression=compressor,
    )
    for step in range(2):
        sum(
            (p.double() * (i + hvd.rank())).sum() for i, p in enumerate(parameters.values())
        ).backward()
        optimizer.synchronize()
        for i, (name, p) in enumerate(parameters.items()):
            expected = torch.full(p.shape, i + (hvd.size() - 1) / 2, dtype=torch.float64)
            torch.testing.assert_close(p.grad.double(), expected, rtol=0.02, atol=0.02, msg=name)
            if p.numel() < 600:
                torch.testing.assert_close(p.grad.double(), expected, rtol=1e-2, atol=0)
            assert_same_everywhere(p.grad.to(torch.float32), f"{name}.{step}")
        optimizer.zero_grad()


def test_a_resumed_run_goes_on_as_the_other():
    """The averages' table is in the state: without it the first step after it would differ."""
    runs = []
    for resumed in (False, True):
        instances.start_over()
        model = make_model()
        make = CASES["alq"]
        compressor = make(exchange="scatter_reduce", seed=3)
        optimizer = distributed(model, compressor)
        train(model, optimizer, 2, seed=1)
        if resumed:
            state = compressor.state_dict()
            compressor.close()
            compressor = make(exchange="scatter_reduce", seed=3)
            compressor.load_state_dict(state)
            optimizer._compression = compressor
        train(model, optimizer, 1, seed=2)
        runs.append(flat_parameters(model))
        assert compressor.parts.default.second_stage(hvd.size()).codec.table_version == 1
    assert torch.equal(*runs)


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


@pytest.mark.parametrize(
    ("make", "lines"),
    [
        (lambda: QSGD(bits=8, norm="linf", exchange="scatter_reduce", seed=next(SEEDS)), 0),
        (coarse, 1),
    ],
    ids=["negligible", "notable"],
)
def test_the_first_rank_alone_warns_of_averages(make, lines, caplog):
    model = make_model()
    with caplog.at_level(logging.WARNING, "hvd_adaptive"):
        train(model, distributed(model, make()), 2)
    told = [record.getMessage() for record in caplog.records]
    found = [line for line in told if "averages over" in line]
    assert len(found) == (lines if hvd.rank() == 0 else 0)
