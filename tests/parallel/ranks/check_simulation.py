"""A simulated run against the real one: the same bits, on every rank, of every scheme and exchange.

Unit tests and tests/oracle compare simulations with loops written by hand and exact averages.
"""

from __future__ import annotations

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from scheme_cases import scheme, schemes
from training import (
    assert_same_everywhere,
    distributed,
    flat_parameters,
    make_model,
    simulated,
    train,
)

from hvd_adaptive import Hierarchical, ScatterReduce, Tuning

from oracle import rotated  # isort: skip

pytestmark = [pytest.mark.ranks, pytest.mark.gloo]

STEPS = 6
REDUCE = {"exchange": "scatter_reduce"}
NODES_OF_ONE = {"exchange": Hierarchical(ranks_per_node=1)}
NODES_OF_TWO = {"exchange": Hierarchical(ranks_per_node=2)}
GROUPS = {"fusion_bytes": 20_000}
# With tables that are fitted twice.
FITTED = {"bucket_size": 256, "update_steps": [0, 3]}
# What check_oracle.py, which draws cases from all settings, does not draw.
CASES = (
    schemes("alq-3-huffman", "alq-3-normal", "ecdq-1.5", **FITTED, **GROUPS)
    | schemes("alq-3-n", "qsgd-4-elias", "natural", "onebit", bucket_size=1024, tail="full")
) | {
    "no worker": scheme("alq-3", **FITTED, **GROUPS, tuning=Tuning(worker=False)),
    "auto feedback": scheme("qsgd-2", bucket_size=64, error_feedback="auto", **GROUPS),
    "qcs mmse": scheme("qcs-mmse-gain10", bucket_size=64, error_feedback=1.0),
    "ecdq few bits": scheme("ecdq-1.5", bits=0.8, update_steps=[0, 3], samples=7),
    "ecdq parts": scheme("ecdq-1.5", **FITTED, scope="tensor", parameter_bits={"2.*": 4}),
    "eden": scheme("eden-1", bucket_size=256, **REDUCE),
    "scatter": scheme("alq-3", **FITTED, **REDUCE),
    "scatter, window": scheme(
        "qsgd-4", bucket_size=128, tuning=Tuning(in_flight_bytes=60_000), **GROUPS, **REDUCE
    ),
    "scatter, one bucket": scheme("natural", bucket_size=2**20, **REDUCE),
    "scatter, ecdq": scheme("ecdq-1.5", **FITTED, **REDUCE),
    "scatter, auto feedback": scheme(
        "qsgd-4-linf", bucket_size=64, scope="tensor", error_feedback="auto", **REDUCE
    ),
    "zeros": scheme("ecdq-2", bucket_size=1024, keep_zeros=True),
    "zeros, scatter": scheme("alq-3-paper", bucket_size=1024, keep_zeros=True, **REDUCE),
    "zeros, nodes": scheme("eden-2", keep_zeros=True, **NODES_OF_ONE),
}
IN_NODES = {
    "alq": scheme("alq-3", **FITTED, **NODES_OF_TWO),
    "window": scheme(
        "terngrad",
        bucket_size=256,
        tuning=Tuning(in_flight_bytes=150_000),
        **GROUPS,
        **NODES_OF_TWO,
    ),
    "one bucket": scheme("qsgd-8-linf", bucket_size=2**20, tail="full", **NODES_OF_TWO),
}


def compare(construct) -> None:
    """Parameters, tables and bytes of the two runs; half of the first layer is dead."""
    model, compressor = make_model(dead=150), construct()
    train(model, distributed(model, compressor, lr=0.3), STEPS)
    assert not model[0].weight.grad[:150].any() or not compressor.settings.keep_zeros
    other, twin = simulated(construct, STEPS, lr=0.3)
    assert torch.equal(flat_parameters(other), flat_parameters(model))
    for label, codec in compressor.parts.items():
        pairs = [(codec, twin.parts[label])]
        if codec.second is not None:
            assert codec.second.bits == twin.parts[label].second.bits
            pairs.append((codec.second.codec, twin.parts[label].second.codec))
        for name in ("levels", "table_version", "delta"):
            for pair in pairs:
                ours, theirs = (torch.as_tensor(getattr(own, name, 0)) for own in pair)
                assert torch.equal(ours, theirs), (label, name)
    report = compressor.report()
    assert report["coordinates"] == sum(p.numel() for p in model.parameters())
    if compressor.settings.exchange_name == "allgather":
        assert report["wire_bytes"] == report["payload_bytes"] * (hvd.size() - 1)


@pytest.mark.parametrize("case", CASES)
def test_simulation_equals_horovod(case):
    compare(CASES[case])


@pytest.mark.nodes
@pytest.mark.parametrize("case", IN_NODES)
def test_nodes_of_two(case):
    if hvd.size() % 2:
        pytest.skip("ranks do not fill nodes")
    compare(IN_NODES[case])


def normal(rank: int, count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize(("bits", "second"), [(1, None), (0.5, None), (3, None), (2, 5)])
def test_averages_of_eden_are_those_of_the_paper(bits, second):
    """Against tests/oracle/rotated.py, up to float32's rounding; with a partial bucket."""
    bucket, count = 256, 768 * hvd.size() - 100
    vectors = [normal(r, count) * torch.linspace(0.01, 3, count) ** 3 for r in range(hvd.size())]
    exchange = "allgather" if second is None else ScatterReduce(second_stage_bits=second)
    compressor = scheme(f"eden-{bits}", bucket_size=bucket, seed=17, exchange=exchange)()
    result = hvd.allreduce(vectors[hvd.rank()], compression=compressor, name="eden.average")
    expected = rotated.average([v.numpy() for v in vectors], bits, second, bucket, seed=17)
    np.testing.assert_allclose(result.numpy(), expected, atol=1e-5 * np.abs(expected).max())
    assert_same_everywhere(result)
