"""Natural compression, 1-bit SGD and Sparse SGD inside stock Horovod."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from conftest import assert_same_everywhere, flat_parameters, learn, make_model, train
from scheme_cases import scheme

from hvd_adaptive import instances
from hvd_adaptive.coding.payload import read_header
from hvd_adaptive.kernels.random import stream_key

SCHEMES = {
    "natural": scheme("natural"),
    "natural_full_tail": scheme("natural", bucket_size=1000, tail="full"),
    "onebit": scheme("onebit", bucket_size=512),
    "onebit_no_feedback": scheme("onebit-no-feedback", bucket_size=128),
    "sparse": scheme("sparse-0.1", bucket_size=1024),
    "sparse_feedback": scheme("sparse-0.3", bucket_size=1024, error_feedback=0.5),
    "sparse_small_groups": scheme("sparse-0.2", fusion_bytes=40_000),
}


def distributed(model, compressor, lr=0.5):
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr),
        named_parameters=model.named_parameters(),
        compression=compressor,
    )


@pytest.mark.parametrize("name", SCHEMES)
def test_replicas_stay_equal_and_learn(name):
    model, compressor = make_model(), SCHEMES[name]()
    optimizer = distributed(model, compressor)
    left = 1.0
    for _ in range(2):
        left *= learn(model, optimizer, 8)
        assert_same_everywhere(flat_parameters(model), "parameters")
    assert left < 0.7
    report = compressor.report()
    assert report["coordinates"] == sum(p.numel() for p in model.parameters())
    assert report["wire_bytes"] == report["payload_bytes"] * (hvd.size() - 1)


@pytest.mark.parametrize("name", SCHEMES)
def test_reduced_tensor_is_the_ranks_own_payloads(name):
    """What arrives equals every rank's tensor encoded under its own key here, decoded alone, and
    added in rank order. Ranks send different lengths where the length is random."""

    def values(rank: int) -> torch.Tensor:
        return torch.randn(5003, generator=torch.Generator().manual_seed(rank))

    result = hvd.allreduce(
        values(hvd.rank()),
        compression=SCHEMES[name](seed=11),
        op=hvd.Average,
        name="check_other_schemes",
    )
    codec, total, lengths = SCHEMES[name](seed=11).parts.default, torch.zeros(5003), set()
    quantized = codec.settings.quantized_part(5003)
    for rank in range(hvd.size()):
        payload = codec.payloads.encode(values(rank), quantized, stream_key(11, rank, 0, 0)).bytes
        lengths.add(payload.numel())
        total += codec.payloads.sum([payload], read_header(payload), 1.0)
    assert torch.equal(result, total * (1.0 / hvd.size()))
    assert (len(lengths) > 1) == name.startswith("sparse")
    assert_same_everywhere(result, "allreduce")


@pytest.mark.parametrize("name", ["natural", "onebit", "sparse_feedback"])
def test_state_survives_to_the_bit(name):
    """A run resumed from its state after 5 steps is the run that was not interrupted."""
    runs = []
    for resumed in (False, True):
        instances.start_over()
        model, compressor = make_model(), SCHEMES[name]()
        optimizer = distributed(model, compressor)
        train(model, optimizer, 5)
        if resumed:
            state = compressor.state_dict()
            compressor.close()
            fresh = make_model()
            fresh.load_state_dict(model.state_dict())
            model, compressor = fresh, SCHEMES[name]()
            compressor.load_state_dict(state)
            optimizer = distributed(model, compressor)
        train(model, optimizer, 5, seed=1)
        runs.append(flat_parameters(model))
    assert torch.equal(*runs)
