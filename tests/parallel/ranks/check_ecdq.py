"""ECDQ inside stock Horovod: codes fitted by the first rank, payloads of varying lengths."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from conftest import assert_same_everywhere, batches, flat_parameters, make_model, train

from hvd_adaptive import ECDQ, instances, simulate
from hvd_adaptive.coding.payload import read_header
from hvd_adaptive.kernels.random import stream_key

SCHEMES = {
    "bits": lambda **k: ECDQ(bits=2.0, bucket_size=1024, update_steps=[0, 1, 4], **k),
    "few_bits": lambda **k: ECDQ(bits=0.8, bucket_size=8192, update_steps=[0, 3], **k),
    "variance": lambda **k: ECDQ(
        relative_variance=0.1, bucket_size=1024, update_steps=[0, 2], tail="full", **k
    ),
    "averaged": lambda **k: ECDQ(
        bits=1.5, bucket_size=1024, update_steps=[0, 2], exchange="scatter_reduce", **k
    ),
    "feedback": lambda **k: ECDQ(
        bits=1.0, bucket_size=1024, update_steps=[0, 1, 3], error_feedback=0.6, **k
    ),
    "parts": lambda **k: ECDQ(
        bits=1.5,
        update_steps=[0, 2],
        scope="tensor",
        bucket_size=500,
        parameter_bits={"2.*": 4},
        **k,
    ),
}


def distributed(model, compressor, lr=0.5):
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr),
        named_parameters=model.named_parameters(),
        compression=compressor,
    )


@pytest.mark.parametrize("name", SCHEMES)
def test_replicas_and_codes_stay_equal(name):
    model, compressor = make_model(), SCHEMES[name](min_numel=100)
    optimizer = distributed(model, compressor)
    for step in range(6):
        train(model, optimizer, 1, seed=step)
        assert_same_everywhere(flat_parameters(model), "parameters")
        for codec in compressor.parts.values():
            assert_same_everywhere(torch.from_numpy(codec.code.numbers()), "code")
    assert compressor.report()["table_version"] >= 2
    report = compressor.report()
    assert report["coordinates"] == sum(p.numel() for p in model.parameters())
    if compressor.settings.exchange == "allgather":
        assert report["wire_bytes"] == report["payload_bytes"] * (hvd.size() - 1)
    assert report["relative_error"] < 4


def test_the_budget_is_met_and_the_error_is_the_promise():
    """Large tensors, so that headers count as the rate control has been told they do."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(100, 1000), torch.nn.ReLU(), torch.nn.Linear(1000, 10)
    )
    compressor = ECDQ(bits=2.0, update_steps=[0, 1, 2, 5], min_numel=0)
    optimizer, sent = distributed(model, compressor, lr=0.1), 0.0
    for step in range(10):
        train(model, optimizer, 1, seed=step)
        report = compressor.report()
        sent += 8 * report["payload_bytes"] / report["coordinates"]
        # Two buckets are measured: Var(U²)/E(U²)² is 4/5 for each coordinate.
        spread = (0.8 / (2 * 8192)) ** 0.5
        assert (
            abs(report["relative_error"] / compressor.parts.default.relative_variance - 1)
            < 6 * spread
        )
    average = hvd.allreduce(
        torch.tensor([sent / 10]), op=hvd.Average, name="check_ecdq.bits"
    ).item()
    assert abs(average / 2.0 - 1) < 0.02


@pytest.mark.parametrize("name", ["bits", "variance"])
def test_reduced_tensor_is_the_ranks_own_payloads(name):
    """What arrives equals every rank's tensor encoded under its own key here, decoded alone, and
    added in rank order, by the code that all of them fitted."""

    def values(rank: int) -> torch.Tensor:
        return torch.randn(5003, generator=torch.Generator().manual_seed(rank)) ** 3

    compressor = SCHEMES[name](seed=11)
    result = hvd.allreduce(
        values(hvd.rank()), compression=compressor, op=hvd.Average, name="check_ecdq.values"
    )
    assert compressor.parts.default.table_version == 1
    total, lengths = torch.zeros(5003), set()
    quantized = compressor.settings.quantized_part(5003)
    for rank in range(hvd.size()):
        key = stream_key(11, rank, 0, 0)
        payload = compressor.parts.default.payloads.encode(values(rank), quantized, key).bytes
        lengths.add(payload.numel())
        total += compressor.parts.default.payloads.sum([payload], read_header(payload), 1.0)
    assert torch.equal(result, total * (1.0 / hvd.size()))
    assert len(lengths) > 1
    assert_same_everywhere(result, "allreduce")


def test_state_survives_to_the_bit():
    """A run resumed from its state after 3 steps is the run that was not interrupted."""
    runs = []
    for resumed in (False, True):
        instances.start_over()
        model, compressor = make_model(), SCHEMES["feedback"]()
        optimizer = distributed(model, compressor)
        train(model, optimizer, 3)
        if resumed:
            state = compressor.state_dict()
            compressor.close()
            fresh = make_model()
            fresh.load_state_dict(model.state_dict())
            model, compressor = fresh, SCHEMES["feedback"]()
            compressor.load_state_dict(state)
            optimizer = distributed(model, compressor)
        train(model, optimizer, 3, seed=1)
        runs.append(flat_parameters(model))
    assert torch.equal(*runs)


def test_simulation_equals_horovod():
    """Rate control included: one compressor stands for all ranks there."""

    def construct() -> ECDQ:
        return ECDQ(bits=1.2, bucket_size=1024, update_steps=[0, 1, 3], samples=7)

    model, compressor = make_model(), construct()
    train(model, distributed(model, compressor), 5)
    sources = [batches(rank) for rank in range(hvd.size())]
    simulated, other = make_model(), construct()
    simulate.train(
        simulated,
        lambda rank, step: sources[rank](),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        compressor=other,
        workers=hvd.size(),
        steps=5,
        progress=False,
    )
    assert torch.equal(flat_parameters(simulated), flat_parameters(model))
    assert (
        other.parts.default.delta == compressor.parts.default.delta
        and other.parts.default.table_version == 3
    )
