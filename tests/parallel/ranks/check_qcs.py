"""QCS inside stock hvd.DistributedOptimizer."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from conftest import assert_same_everywhere, flat_parameters, learn, make_model, train

from hvd_adaptive import QCS, instances
from hvd_adaptive.coding.payload import read_header
from hvd_adaptive.kernels.random import stream_key


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"bucket_size": 1024, "gain": 21},
        {"bucket_size": 2048, "gain": 50, "estimator": "mmse"},
        {"bucket_size": 100, "measurements": 60, "quantizer_range": 1, "fusion_bytes": 40_000},
        {"bucket_size": 384, "quantizer_range": 0.5, "tail": "full"},
        {"bucket_size": 512, "gain": 16, "warmup_steps": 3},
    ],
    ids=str,
)
def test_replicas_stay_equal_and_learn(keywords):
    model = make_model()
    compressor = QCS(**keywords)
    # The MMSE estimator shortens every step to 1/(γ + 1).
    optimizer = _optimizer(
        model, compressor, lr=2.0 if compressor.parts.default.estimator == "mmse" else 0.5
    )
    left = 1.0
    for _ in range(2):
        left *= learn(model, optimizer, 8)
        assert_same_everywhere(flat_parameters(model), "parameters")
    assert left < 0.7
    report = compressor.report()
    assert report["coordinates"] == sum(p.numel() for p in model.parameters())
    assert report["wire_bytes"] == report["payload_bytes"] * (hvd.size() - 1)
    assert 0 < report["relative_error"] < 3 * compressor.parts.default.gamma


@pytest.mark.parametrize("estimator", ["unbiased", "mmse"])
def test_reduced_tensor_is_the_ranks_own_estimates(estimator):
    """What arrives equals every rank's tensor encoded under its own key here, decoded, and added
    in rank order."""
    keywords = {"bucket_size": 512, "gain": 20, "estimator": estimator, "seed": 11}

    def values(rank: int) -> torch.Tensor:
        return torch.randn(5000, generator=torch.Generator().manual_seed(rank))

    result = hvd.allreduce(
        values(hvd.rank()), compression=QCS(**keywords), op=hvd.Average, name="check_qcs"
    )
    codec, total = QCS(**keywords).parts.default, torch.zeros(5000)
    bodies = []
    for rank in range(hvd.size()):
        payload = codec.payloads.encode(values(rank), 5000, stream_key(11, rank, 0, 0)).bytes
        bodies.append(payload[96 : 96 + codec.body_bytes(5000)].clone())
        total += codec.payloads.sum([payload], read_header(payload), 1.0)
    assert torch.equal(result, total * (1.0 / hvd.size()))
    assert not torch.equal(bodies[0], bodies[-1])
    assert_same_everywhere(result, "allreduce")


def test_state_survives_to_the_bit():
    """A run resumed from its state after 5 steps is the run that was not interrupted."""
    runs = []
    for resumed in (False, True):
        instances.start_over()
        model, compressor = make_model(), QCS(bucket_size=1024, gain=16)
        optimizer = _optimizer(model, compressor)
        train(model, optimizer, 5)
        if resumed:
            weights, state = model.state_dict(), compressor.state_dict()
            model, compressor = make_model(), QCS(bucket_size=1024, gain=16)
            model.load_state_dict(weights)
            compressor.load_state_dict(state)
            optimizer = _optimizer(model, compressor)
        train(model, optimizer, 5, seed=1)
        runs.append(flat_parameters(model))
    assert torch.equal(*runs)


def _optimizer(model: torch.nn.Module, compressor: QCS, lr: float = 0.1) -> torch.optim.Optimizer:
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr),
        named_parameters=model.named_parameters(),
        compression=compressor,
    )
