"""A simulated run against the real one: the same bits, on every rank, of every scheme and exchange.

Unit tests and tests/oracle compare simulations with loops written by hand and exact averages.
"""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from conftest import flat_parameters, make_model, simulated, train
from rank_optimizers import distributed
from scheme_cases import scheme

from hvd_adaptive import Hierarchical, ScatterReduce, Tuning, instances
from hvd_adaptive.coding.payload import read_header
from hvd_adaptive.kernels.random import stream_key

pytestmark = [pytest.mark.ranks, pytest.mark.gloo]

STEPS = 6
REDUCE = {"exchange": "scatter_reduce"}
NODES_OF_TWO = {"exchange": Hierarchical(ranks_per_node=2)}
CASES = {
    "alq": scheme("alq-3", bucket_size=1024, update_steps=[0, 5], samples=7, seed=3),
    "alq-no-worker": scheme(
        "alq-3",
        bucket_size=256,
        update_steps=[0, 5],
        fusion_bytes=20_000,
        tuning=Tuning(worker=False),
    ),
    "alq-small-groups": scheme(
        "alq-3", bucket_size=256, update_steps=[0, 5], fusion_bytes=20_000, error_feedback=0.2
    ),
    "alq-tensor": scheme("alq-4", bucket_size=512, scope="tensor", update_steps=[1], tail="full"),
    "alq-cut": scheme(
        "alq-3-normal",
        scope="tensor",
        bucket_size=100,
        fusion_bytes=20_000,
        update_steps=[0, 4],
        warmup_steps=1,
    ),
    "alq-feedback": scheme(
        "alq-2", bucket_size=256, error_feedback=0.4, update_steps=[0, 3], clip=3.0
    ),
    "alq-paper": scheme("alq-3-paper", bucket_size=1024),
    "alq-n": scheme("alq-2", bucket_size=128, normalized=True),
    "alq-8-descent": scheme(
        "alq-8", bucket_size=100, fusion_bytes=40_000, solver="gradient_descent", update_steps=[0]
    ),
    "alq-huffman": scheme("alq-3-huffman", bucket_size=512, update_steps=[0, 3], scope="tensor"),
    "amq": scheme("amq-4", bucket_size=1024, symmetric=True, normalized=True, update_steps=[0, 5]),
    "amq-bits": scheme("amq-3", bucket_size=256, parameter_bits={"*": 5}),
    "nuqsgd": scheme("nuqsgd-4-huffman", bucket_size=128),
    "qsgd-s5": scheme("qsgd-s5", bucket_size=64),
    "qsgd-elias": scheme("qsgd-4-elias", bucket_size=512),
    "qsgd-parts": scheme("qsgd-4-linf", bucket_size=500, parameter_bits={"0.weight": 2}),
    "qsgd-auto-feedback": scheme(
        "qsgd-2", bucket_size=64, error_feedback="auto", fusion_bytes=20_000
    ),
    "terngrad": scheme("terngrad", bucket_size=1024, fusion_bytes=40_000, warmup_steps=2),
    "terngrad-feedback": scheme("terngrad", bucket_size=64, error_feedback=0.5, tail="full"),
    "terngrad-unclipped": scheme("terngrad-unclipped", bucket_size=64),
    "orq": scheme("orq-3-clip2.5", bucket_size=500),
    "orq-half": scheme("orq-9-half", bucket_size=512),
    "orq-descent": scheme("orq-5-descent", tail="full", scope="tensor"),
    "quantile": scheme("quantile-9", bucket_size=300, fusion_bytes=40_000),
    "bingrad": scheme("bingrad", bucket_size=1000),
    "bingrad-iterated": scheme("bingrad-biased-iterated", clip=1.7),
    "signsgd": scheme("signsgd", bucket_size=256),
    "natural": scheme("natural", bucket_size=1000, tail="full"),
    "onebit": scheme("onebit", bucket_size=256),
    "sparse": scheme("sparse-0.1", bucket_size=1024, fusion_bytes=40_000),
    "sparse-feedback": scheme("sparse-0.3", bucket_size=256, error_feedback=0.2),
    "qcs": scheme("qcs", bucket_size=100, measurements=60, quantizer_range=1, fusion_bytes=40_000),
    "qcs-tail": scheme("qcs", bucket_size=384, quantizer_range=0.5, tail="full", warmup_steps=3),
    "qcs-mmse": scheme("qcs-mmse-gain10", bucket_size=64, error_feedback=1.0),
    "ecdq-few-bits": scheme("ecdq-1.5", bits=0.8, bucket_size=8192, update_steps=[0, 3], samples=7),
    "ecdq-variance": scheme("ecdq-variance0.1", bucket_size=1024, update_steps=[0, 2], tail="full"),
    "ecdq-feedback": scheme(
        "ecdq-1.5", bits=1.0, bucket_size=1024, update_steps=[0, 1, 3], error_feedback=0.6
    ),
    "ecdq-parts": scheme(
        "ecdq-1.5", bucket_size=500, update_steps=[0, 2], scope="tensor", parameter_bits={"2.*": 4}
    ),
    "eden": scheme("eden-1", bucket_size=256, **REDUCE),
    "scatter-alq": scheme("alq-3", bucket_size=1024, update_steps=[0, 3], **REDUCE),
    "scatter-alq-never": scheme("alq-3", bucket_size=512, update_steps=[], **REDUCE),
    "scatter-amq-parts": scheme(
        "amq-3",
        bucket_size=256,
        parameter_bits={"0.weight": 4},
        fusion_bytes=30_000,
        exchange=ScatterReduce(second_stage_bits=6),
    ),
    "scatter-tensor": scheme(
        "alq-4",
        bucket_size=500,
        scope="tensor",
        tail="full",
        exchange=ScatterReduce(second_stage_bits=6),
    ),
    "scatter-window": scheme(
        "qsgd-4",
        bucket_size=128,
        fusion_bytes=20_000,
        tuning=Tuning(in_flight_bytes=60_000),
        **REDUCE,
    ),
    "scatter-orq": scheme("orq-5", bucket_size=1024, warmup_steps=2, **REDUCE),
    "scatter-sparse": scheme("sparse-0.1", bucket_size=2048, error_feedback=0.05, **REDUCE),
    "scatter-one-bucket": scheme("natural", bucket_size=2**20, **REDUCE),
    "scatter-full": scheme("qsgd-3", bucket_size=256, exchange=ScatterReduce(second_stage_bits=32)),
    "scatter-ecdq": scheme("ecdq-1.5", bucket_size=1024, update_steps=[0, 2], **REDUCE),
    "scatter-auto-feedback": scheme(
        "qsgd-4-linf",
        bucket_size=64,
        scope="tensor",
        error_feedback="auto",
        exchange=ScatterReduce(second_stage_bits=32),
    ),
    "nodes-of-one": scheme("qsgd-4", bucket_size=512, exchange=Hierarchical(ranks_per_node=1)),
    "zeros": scheme("ecdq-2", bucket_size=1024, keep_zeros=True),
    "zeros-scatter": scheme("alq-3-paper", bucket_size=1024, keep_zeros=True, **REDUCE),
    "zeros-nodes": scheme("eden-2", keep_zeros=True, exchange=Hierarchical(ranks_per_node=1)),
}
IN_NODES = {
    "alq": scheme("alq-3", bucket_size=1024, update_steps=[0, 3], **NODES_OF_TWO),
    "window": scheme(
        "terngrad",
        bucket_size=256,
        fusion_bytes=20_000,
        tuning=Tuning(in_flight_bytes=150_000),
        **NODES_OF_TWO,
    ),
    "one-bucket": scheme("qsgd-8-linf", bucket_size=2**20, tail="full", **NODES_OF_TWO),
}


def compare(construct) -> None:
    """Parameters, tables and bytes of the two runs; half of the first layer is dead."""
    instances.start_over()  # tests/parallel/ranks/repeat.py compares one case after the other
    model, compressor = make_model(), construct()
    model[0].bias.data[:150] = -1e3
    train(model, distributed(model, compressor, lr=0.3), STEPS)
    assert not model[0].weight.grad[:150].any() or not compressor.settings.keep_zeros
    other, twin = simulated(construct, STEPS, lr=0.3)
    assert torch.equal(flat_parameters(other), flat_parameters(model))
    for label, codec in compressor.parts.items():
        for name in ("levels", "table_version", "delta"):
            ours, theirs = (getattr(own, name, 0) for own in (codec, twin.parts[label]))
            assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs)), (label, name)
        second = codec.second
        if second is not None and hasattr(second.codec, "levels"):
            assert second.bits == twin.parts[label].second.bits
            ours, theirs = second.codec.levels, twin.parts[label].second.codec.levels
            assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs)), label
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


CODECS = ["natural", "onebit-no-feedback", "sparse-0.1", "qcs-mmse-gain10", "orq-9"]


@pytest.mark.parametrize("label", CODECS)
def test_reduced_tensor_is_the_ranks_own_payloads(label):
    """Each rank's tensor is encoded with its key here, decoded alone, and added in rank order."""

    def values(rank: int) -> torch.Tensor:
        return torch.randn(5003, generator=torch.Generator().manual_seed(rank))

    construct = scheme(label, bucket_size=512, seed=11)
    result = hvd.allreduce(values(hvd.rank()), compression=construct(), name=f"own.{label}")
    codec, total, lengths = construct().parts.default, torch.zeros(5003), set()
    quantized = codec.settings.quantized_part(5003)
    for rank in range(hvd.size()):
        payload = codec.payloads.encode(values(rank), quantized, stream_key(11, rank, 0, 0)).bytes
        lengths.add(payload.numel())
        total += codec.payloads.sum([payload], read_header(payload), 1.0)
    assert torch.equal(result, total * (1.0 / hvd.size()))
    assert (len(lengths) > 1) == label.startswith("sparse")
