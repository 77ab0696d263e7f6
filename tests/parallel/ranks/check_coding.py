"""Coded payloads between ranks: the same bits as packed ones, in fewer bytes."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from conftest import assert_same_everywhere, batches, flat_parameters, make_model, train
from rank_optimizers import distributed

from hvd_adaptive import ALQ, QSGD, TernGrad, instances

SHARED = {"bucket_size": 512, "update_steps": [0, 3]}
CASES = {
    "alq": (ALQ, "huffman", {"bits": 3}),
    "alq_tensor": (ALQ, "huffman", {"bits": 3, "scope": "tensor"}),
    "alq_feedback": (ALQ, "huffman", {"bits": 2, "error_feedback": 0.5}),
    "qsgd": (QSGD, "huffman", {"bits": 3, "fusion_bytes": 60_000}),
    "terngrad": (TernGrad, "huffman", {}),
    "terngrad_elias": (TernGrad, "elias", {"clip": None}),
    "qsgd_elias": (QSGD, "elias", {"bits": 4}),
}


@pytest.mark.parametrize("case", CASES)
def test_coded_training_is_packed_training(case):
    """Six steps with two updates: parameters, books and tables, bit for bit."""
    scheme, coding, keywords = CASES[case]
    ends, sizes = [], []
    for chosen in (coding, "fixed"):
        instances.start_over()
        model, compressor = make_model(), scheme(coding=chosen, **SHARED, **keywords)
        losses = train(model, distributed(model, compressor, lr=0.1), 6)
        assert_same_everywhere(flat_parameters(model), f"{case}.{chosen}.parameters")
        prints = [codec.table_fingerprint for codec in compressor.parts.values()]
        assert_same_everywhere(torch.tensor(prints), f"{case}.{chosen}.tables")
        ends.append((flat_parameters(model), torch.tensor(losses)))
        report = compressor.report()
        sizes.append(report["payload_bytes"])
        assert report["wire_bytes"] == report["payload_bytes"] * (hvd.size() - 1)
        fitted = scheme is ALQ or chosen == "huffman"
        assert report["table_version"] == (2 if fitted else 0)
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    assert sizes[0] < 0.97 * sizes[1], "coded"


def test_payloads_of_different_lengths():
    """One rank's gradient is sparse, another's is not: lengths vary from rank to rank."""
    ends = []
    for coding in ("huffman", "fixed"):
        instances.start_over()
        model = make_model()
        compressor = QSGD(bits=3, norm="linf", coding=coding, **SHARED)
        optimizer = distributed(model, compressor)
        batch = batches(hvd.rank())
        for _ in range(3):
            optimizer.zero_grad()
            x, y = batch()
            scale = 1.0 if hvd.rank() else 0.0
            (scale * torch.nn.functional.cross_entropy(model(x), y)).backward()
            optimizer.step()
        length = torch.tensor([float(compressor.report()["payload_bytes"])])
        lengths = hvd.allgather(length, name=f"lengths.{coding}")
        assert (lengths.unique().numel() > 1) == (coding == "huffman")
        assert_same_everywhere(flat_parameters(model), f"lengths.{coding}.parameters")
        ends.append(flat_parameters(model))
    assert torch.equal(*ends)
