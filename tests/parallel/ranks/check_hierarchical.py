"""exchange="hierarchical" inside stock hvd.DistributedOptimizer; nodes of two ranks, pretended."""

from __future__ import annotations

import itertools

import horovod.torch as hvd
import pytest
import torch
from conftest import assert_same_everywhere, batches, flat_parameters, make_model, train

from hvd_adaptive import ALQ, QSGD, Hierarchical, PayloadError, TernGrad, Tuning, simulate
from hvd_adaptive.coding.header import SIZE
from hvd_adaptive.transport.collectives import Among

SEEDS = itertools.count(4000)
NODES_OF_TWO = Hierarchical(ranks_per_node=2)
CASES = {
    "nodes-of-two": lambda **k: ALQ(
        bits=3, bucket_size=1024, update_steps=[0, 3], exchange=NODES_OF_TWO, **k
    ),
    "nodes-of-one": lambda **k: QSGD(
        bits=4, bucket_size=512, exchange=Hierarchical(ranks_per_node=1), **k
    ),
    "window": lambda **k: TernGrad(
        bucket_size=256,
        fusion_bytes=20_000,
        tuning=Tuning(in_flight_bytes=150_000),
        exchange=NODES_OF_TWO,
        **k,
    ),
    "one-bucket": lambda **k: QSGD(
        bits=8, norm="linf", bucket_size=2**20, tail="full", exchange=NODES_OF_TWO, **k
    ),
}


def distributed(model, compressor):
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=compressor,
    )


@pytest.mark.nodes
@pytest.mark.parametrize("name", CASES)
def test_equal_replicas_and_the_same_bits_as_simulated(name):
    steps, seed = 5, next(SEEDS)
    model, compressor = make_model(), CASES[name](seed=seed)
    optimizer, own = distributed(model, compressor), batches(hvd.rank())
    for _ in range(steps):
        x, y = own()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert_same_everywhere(flat_parameters(model), name)

    sources = [batches(rank) for rank in range(hvd.size())]
    simulated = make_model()
    simulate.train(
        simulated,
        lambda rank, step: sources[rank](),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.9),
        compressor=CASES[name](seed=seed),
        workers=hvd.size(),
        steps=steps,
        progress=False,
    )
    assert torch.equal(flat_parameters(simulated), flat_parameters(model))


def test_nodes_are_found_out_and_only_what_leaves_them_counts():
    """All ranks run here: one node, nothing compressed, no byte on a wire."""
    model, compressor = make_model(), ALQ(exchange="hierarchical", seed=next(SEEDS))
    train(model, distributed(model, compressor), 2)
    assert_same_everywhere(flat_parameters(model), "one node")
    report = compressor.report()
    assert report["wire_bytes"] == 0 and report["payload_bytes"] == 0


def test_what_leaves_a_node_is_compressed():
    if hvd.size() % 2 or hvd.size() < 4:
        pytest.skip("needs two nodes of two ranks")
    model = make_model()
    compressor = QSGD(bits=4, exchange=Hierarchical(ranks_per_node=2), seed=next(SEEDS))
    train(model, distributed(model, compressor), 1)
    report = compressor.report()
    # Half of the group from each rank of a node, to the other node; small tensors as they are.
    full = sum(p.numel() for p in model.parameters() if p.numel() < 1024)
    half = (4 / 8 * (report["coordinates"] - full) + 4 * full) / 2
    assert report["wire_bytes"] == pytest.approx(half, rel=0.1)


def test_a_corrupt_payload_fails_on_all_ranks(monkeypatch):
    """Damaged between two nodes; the ranks of other slices must not wait."""
    if hvd.size() < 4:
        pytest.skip("needs two nodes of two ranks")
    model = make_model()
    compressor = QSGD(exchange=Hierarchical(ranks_per_node=2), seed=next(SEEDS))
    optimizer = distributed(model, compressor)
    train(model, optimizer, 1)
    submit = Among.submit

    def damaged(self, world, name):
        if world.rank == 0 and not self.local:
            self.request.data.bytes[SIZE + 5] ^= 16
        return submit(self, world, name)

    monkeypatch.setattr(Among, "submit", damaged)
    with pytest.raises(PayloadError, match="corrupt"):
        train(model, optimizer, 1)
    hvd.barrier()


def test_a_bucket_that_is_not_finite_is_so_everywhere():
    model = torch.nn.Linear(64, 64, bias=False)
    per_node = 2 if hvd.size() >= 4 else 1
    compressor = ALQ(
        bucket_size=256, exchange=Hierarchical(ranks_per_node=per_node), seed=next(SEEDS)
    )
    optimizer = distributed(model, compressor)
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(hvd.rank()))
    if hvd.rank() == hvd.size() - 1:
        weight[40, 3], weight[4, 0] = torch.inf, torch.nan
    (model.weight * weight).sum().backward()
    optimizer.synchronize()
    bad = model.weight.grad.reshape(-1, 256).isnan()
    assert bad[[1, 10]].all() and bad.sum() == 512
    assert_same_everywhere(model.weight.grad.nan_to_num(7.0), "nan")
