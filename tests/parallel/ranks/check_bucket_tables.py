"""Per-bucket tables inside stock hvd.DistributedOptimizer, on every rank at once."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from conftest import assert_same_everywhere, batches, flat_parameters, learn, make_model, train
from rank_optimizers import distributed
from scheme_cases import scheme

from hvd_adaptive import ORQ, RankMismatchError, instances
from hvd_adaptive.kernels.random import stream_key

CASES = {
    "orq3": scheme("orq-3-clip2.5", bucket_size=500),
    "orq9": scheme("orq-9", bucket_size=512),
    "orq9_half": scheme("orq-9-half", bucket_size=512),
    "orq5_descent": scheme("orq-5-descent", tail="full"),
    "linear": scheme("quantile-9", bucket_size=300, fusion_bytes=40_000),
    "bingrad_pb": scheme("bingrad", bucket_size=1000),
    "bingrad_b": scheme("bingrad-biased-clip1.7", bucket_size=1000),
    "bingrad_iterated": scheme("bingrad-biased-iterated"),
    "signsgd": scheme("signsgd", bucket_size=256),
    "orq_tensor": scheme("orq-5", scope="tensor"),
}


@pytest.mark.parametrize("case", CASES)
def test_replicas_stay_equal_and_learn(case):
    model, compressor = make_model(), CASES[case]()
    left = learn(model, distributed(model, compressor, lr=0.5))
    assert_same_everywhere(flat_parameters(model), f"{case}.parameters")
    # Two levels of a bucket learn more slowly.
    assert left < (0.5 if compressor.parts.default.alphabet > 2 else 0.85)
    report = compressor.report()
    assert report["payload_bytes"] < report["uncompressed_bytes"] / 4


@pytest.mark.parametrize("case", [case for case in CASES if case != "orq_tensor"])
def test_the_gradient_is_that_of_all_ranks_payloads(case):
    """Each group's payloads, encoded and decoded here by a lone compressor."""
    model, compressor = make_model(), CASES[case]()
    optimizer = distributed(model, compressor)
    batch = batches(hvd.rank())
    for step in range(2):
        optimizer.zero_grad()
        x, y = batch()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        own = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.synchronize()
        everyone = {
            name: hvd.allgather(grad[None], name=f"{case}.{step}.{name}")
            for name, grad in own.items()
        }
        layout, alone = compressor._training.layout, CASES[case]()
        got = {name: p.grad.reshape(-1) for name, p in model.named_parameters()}
        for index, group in enumerate(layout.groups):
            total = 0.0
            names = [layout.members[piece.slot].name for piece in group.pieces]
            for rank in range(hvd.size()):
                parts = [
                    everyone[name][rank].reshape(-1)[piece.start : piece.stop]
                    for name, piece in zip(names, group.pieces, strict=True)
                ]
                key = stream_key(compressor.settings.seed, rank, step, index)
                payload = alone.parts.default.payloads.encode(
                    torch.cat(parts), group.quantized, key
                ).bytes
                total = total + alone.decode(payload)
            total = total * (1.0 / hvd.size())
            for name, piece in zip(names, group.pieces, strict=True):
                want = total[piece.at : piece.at + piece.stop - piece.start]
                assert torch.equal(got[name][piece.start : piece.stop], want), (case, name)
        with optimizer.skip_synchronize():
            optimizer.step()


@pytest.mark.parametrize("case", ("orq9", "bingrad_pb"))
def test_a_resumed_run_goes_on_bit_for_bit(case):
    ends = []
    for resumed in (False, True):
        instances.start_over()
        model, compressor = make_model(), CASES[case]()
        optimizer = distributed(model, compressor)
        train(model, optimizer, 3)
        if resumed:
            weights, state = model.state_dict(), compressor.state_dict()
            model, compressor = make_model(), CASES[case]()
            model.load_state_dict(weights)
            compressor.load_state_dict(state)
            optimizer = distributed(model, compressor)
        train(model, optimizer, 3, seed=1)
        ends.append(flat_parameters(model))
    assert torch.equal(*ends)


def test_a_nan_on_one_rank_is_a_nan_on_all():
    model = make_model()
    optimizer = distributed(model, ORQ(levels=9, bucket_size=100))
    bad = torch.nan if hvd.rank() == hvd.size() - 1 else 0.0
    model[0].weight.register_hook(lambda grad: torch.where(grad == grad[0, 0], bad, grad))
    x, y = batches(hvd.rank())()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.synchronize()
    bad = model[0].weight.grad.isnan().reshape(-1)
    assert bad[0] and not bad.all()
    assert_same_everywhere(bad.to(torch.float32), "nan")


def test_ranks_with_different_solvers_are_told():
    model = make_model()
    solver = "coordinate_descent" if hvd.rank() == 1 else "greedy"
    optimizer = distributed(model, ORQ(levels=9, seed=78, solver=solver))
    with pytest.raises(RankMismatchError, match="disagree on settings"):
        train(model, optimizer, 1)
    hvd.barrier()
