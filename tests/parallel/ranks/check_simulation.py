"""A simulated run against the real one: the same bits after every step, on every rank."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from conftest import batches, flat_parameters, make_model

from hvd_adaptive import ALQ, EDEN, QSGD, Hierarchical, TernGrad, Tuning, instances, simulate

STEPS = 6


CASES = {
    "alq": lambda: ALQ(bits=3, bucket_size=1024, update_steps=[0, 5], samples=7, seed=3),
    "alq-no-worker": lambda: ALQ(
        bits=3,
        bucket_size=256,
        update_steps=[0, 5],
        fusion_bytes=20_000,
        tuning=Tuning(worker=False),
    ),
    "alq-small-groups": lambda: ALQ(
        bits=3, bucket_size=256, update_steps=[0, 5], fusion_bytes=20_000, error_feedback=0.2
    ),
    "alq-nodes": lambda: ALQ(
        bits=4,
        bucket_size=256,
        update_steps=[0, 5],
        exchange=Hierarchical(ranks_per_node=1 if hvd.size() % 2 else 2),
    ),
    "alq-tensor": lambda: ALQ(
        bits=4, bucket_size=512, scope="tensor", update_steps=[1], tail="full"
    ),
    "qsgd-parts": lambda: QSGD(
        bits=4, bucket_size=500, norm="linf", parameter_bits={"0.weight": 2}
    ),
    "alq-feedback": lambda: ALQ(
        bits=2, bucket_size=256, error_feedback=0.4, update_steps=[0, 3], clip=3.0
    ),
    "eden": lambda: EDEN(bits=1, bucket_size=256, exchange="scatter_reduce"),
    "terngrad": lambda: TernGrad(bucket_size=1024, fusion_bytes=40_000, warmup_steps=2),
}


@pytest.mark.parametrize("construct", CASES.values(), ids=CASES)
def test_simulation_equals_horovod(construct):
    instances.start_over()  # tests/parallel/ranks/repeat.py calls this for one case after the other
    model, compressor = make_model(), construct()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=compressor,
    )
    own = batches(hvd.rank())
    for _ in range(STEPS):
        x, y = own()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    sources = [batches(rank) for rank in range(hvd.size())]
    simulated, other = make_model(), construct()
    simulate.train(
        simulated,
        lambda rank, step: sources[rank](),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.9),
        compressor=other,
        workers=hvd.size(),
        steps=STEPS,
        progress=False,
    )
    assert torch.equal(flat_parameters(simulated), flat_parameters(model))
    for label, codec in compressor.parts.items():
        ours, theirs = (torch.as_tensor(own.levels) for own in (codec, other.parts[label]))
        assert torch.equal(ours, theirs), label
