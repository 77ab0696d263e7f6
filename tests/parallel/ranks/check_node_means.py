"""What reports and tables are made of where a rank's own gradient is not what it quantises: nodes'
means, plain numbers. Errors and laws of exact averages, computed in NumPy."""

from __future__ import annotations

import itertools
import math

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from conftest import assert_same_everywhere
from exact_errors import bucket_errors
from nets import Given
from rank_optimizers import distributed

from hvd_adaptive import ALQ, QSGD, Hierarchical
from hvd_adaptive.exchange import auto

pytestmark = pytest.mark.ranks

SEEDS = itertools.count(7400)
BUCKET = 512
# Coordinates of two tensors, each a group: two full buckets and a partial one for each of two
# slices at most, all of which are measured.
LARGE, SMALL = 4 * BUCKET + 100, 2 * BUCKET


def gradients_of(rank: int, sizes) -> list[torch.Tensor]:
    """Ranks of a node have a normal mean, and heavy tails, ten times as large, that cancel."""
    found = []
    for place, size in enumerate(sizes):
        generator = torch.Generator().manual_seed(50 * place + rank // 2)
        common = torch.randn(size, generator=generator)
        apart = 10 * torch.randn(size, generator=generator) ** 3
        found.append(common + (-1) ** rank * apart)
    return found


def node_mean(node: int, place: int, sizes) -> np.ndarray:
    pair = [gradients_of(2 * node + i, sizes)[place].double().numpy() for i in (0, 1)]
    return (pair[0] + pair[1]) / 2


def trained(compressor, sizes):
    """One step; the averages."""
    model = Given(sizes)
    optimizer = distributed(model, compressor, lr=1.0)
    model(gradients_of(hvd.rank(), sizes)).backward()
    optimizer.step()
    averages = [-p.detach() for p in model.parameters()]
    for place, average in enumerate(averages):
        assert_same_everywhere(average, f"average{place}")
    return averages


def error_of(v: np.ndarray, levels: np.ndarray) -> float:
    """E||Q(v) - v||² of L-infinity buckets laid end to end."""
    return float(bucket_errors(v, levels, BUCKET, "linf").sum())


def pretend(monkeypatch, fastest_of):
    """As if the candidate ``fastest_of(coordinates)`` had been measured to be the fastest."""

    def seconds(exchange, world, compressor, size, name, device):
        return 1.0 if name.rpartition(".auto.")[2] == fastest_of(size) else 2.0

    monkeypatch.setattr(auto, "measure", seconds)


@pytest.mark.nodes
@pytest.mark.parametrize("tensors", [(LARGE,), (BUCKET,), (LARGE, SMALL)], ids=str)
def test_the_error_told_is_that_of_this_ranks_slice_of_the_mean(tensors):
    if hvd.size() != 4:
        pytest.skip("needs two nodes of two ranks")
    compressor = QSGD(
        bits=4,
        norm="linf",
        bucket_size=BUCKET,
        min_numel=0,
        fusion_bytes=4 * 17 * BUCKET,
        exchange=Hierarchical(ranks_per_node=2),
        seed=next(SEEDS),
    )
    trained(compressor, tensors)
    node, place = divmod(hvd.rank(), 2)
    levels = compressor.levels.numpy()
    error = norm = 0.0
    for tensor, size in enumerate(tensors):
        buckets = -(-size // BUCKET)
        begin, end = (min(size, buckets * p // 2 * BUCKET) for p in (place, place + 1))
        own = node_mean(node, tensor, tensors)[begin:end]
        error, norm = error + error_of(own, levels), norm + np.sum(own**2)
    found = compressor.report()["relative_error"]
    if norm:
        assert found == pytest.approx(error / norm, rel=1e-3)
    else:  # one bucket: the other rank of the node quantises it
        assert math.isnan(found) and tensors == (BUCKET,)


@pytest.mark.nodes
def test_tables_are_fitted_to_each_ranks_gradient():
    """Every bucket is sampled: the table is that of a fit, by one process, to all gradients."""
    if hvd.size() != 4:
        pytest.skip("needs two nodes of two ranks")
    sizes, own = (16 * BUCKET, 2 * BUCKET), {"bits": 4, "bucket_size": BUCKET}
    compressor = ALQ(
        exchange=Hierarchical(ranks_per_node=2),
        samples=100,
        fusion_bytes=4 * sizes[0],
        min_numel=0,
        seed=next(SEEDS),
        **own,
    )
    trained(compressor, sizes)
    wanted = ALQ(**own)
    wanted.fit([g for rank in range(4) for g in gradients_of(rank, sizes)])
    assert compressor.parts.default.table_version == 1
    np.testing.assert_allclose(compressor.levels.numpy(), wanted.levels.numpy(), rtol=1e-4)
    assert_same_everywhere(compressor.levels.float(), "levels")


def test_a_few_samples_of_a_few_ranks_are_enough_for_all():
    """One bucket, which one rank of each node quantises: the other has no sample, nobody waits."""
    per_node = 2 if hvd.size() == 4 else 1
    compressor = ALQ(
        bits=4,
        bucket_size=BUCKET,
        min_numel=0,
        exchange=Hierarchical(ranks_per_node=per_node),
        update_steps=[0, 1, 2],
        seed=next(SEEDS),
    )
    model = Given((BUCKET,))
    optimizer = distributed(model, compressor, lr=1.0)
    for _ in range(4):
        optimizer.zero_grad()
        model(gradients_of(hvd.rank(), (BUCKET,))).backward()
        optimizer.step()
    assert compressor.parts.default.table_version == 3
    assert_same_everywhere(compressor.levels.float(), "levels")


@pytest.mark.nodes
def test_what_leaves_a_node_is_compressed():
    if hvd.size() != 4:
        pytest.skip("needs two nodes of two ranks")
    nodes, sizes = Hierarchical(ranks_per_node=2), (64 * BUCKET, 16 * BUCKET, 300)
    compressor = QSGD(bits=4, bucket_size=BUCKET, exchange=nodes, seed=next(SEEDS))
    trained(compressor, sizes)
    # Half of the group from each rank of a node, to the other node; small tensors as they are.
    half = (4 / 8 * (sum(sizes) - 300) + 4 * 300) / 2
    assert compressor.report()["wire_bytes"] == pytest.approx(half, rel=0.1)


def test_ranks_of_one_node_have_no_error_and_fit_nothing():
    sizes = (LARGE, SMALL)
    compressor = ALQ(bucket_size=BUCKET, exchange="hierarchical", seed=next(SEEDS))
    averages = trained(compressor, sizes)
    report = compressor.report()
    assert report["relative_error"] == report["wire_bytes"] == report["payload_bytes"] == 0
    assert compressor.parts.default.table_version == 0
    for place, average in enumerate(averages):
        rows = [gradients_of(rank, sizes)[place].double() for rank in range(hvd.size())]
        exact = torch.stack(rows).mean(0)
        torch.testing.assert_close(average.double(), exact, rtol=1e-5, atol=1e-4)


def as_bfloat16(v: np.ndarray) -> np.ndarray:
    """The nearest number of 8 significant bits, ties to even."""
    bits = v.astype(np.float32).view(np.uint32).astype(np.uint64)
    kept = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return kept.astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("label", ["float32", "bfloat16"])
@pytest.mark.parametrize("warmup", [0, 1])
def test_groups_that_travel_plain_have_the_error_of_that(label, warmup, monkeypatch):
    """Zero, or that of rounding; they quantise nothing."""
    pretend(monkeypatch, lambda size: label)
    sizes = (2 * BUCKET + 7, 40)
    compressor = ALQ(bucket_size=BUCKET, exchange="auto", warmup_steps=warmup, seed=next(SEEDS))
    trained(compressor, sizes)
    own = np.concatenate([g.numpy() for g in gradients_of(hvd.rank(), sizes)])
    exact = own.astype(np.float64)
    sent = exact if label == "float32" else as_bfloat16(own).astype(np.float64)
    wanted = np.sum((sent - exact) ** 2) / np.sum(exact**2)
    assert compressor.report()["relative_error"] == pytest.approx(wanted, rel=1e-6)
    assert (wanted > 0) == (label == "bfloat16")


def test_plain_and_quantised_groups_weigh_as_their_gradients(monkeypatch):
    """And a monitor's figures of groups are each one's own."""
    # The first tensor, which the backward pass reaches last, is cut into two groups.
    sizes = (2 * BUCKET, BUCKET + 9)
    pretend(monkeypatch, lambda size: "allgather")
    monkeypatch.setattr(
        auto.AutoExchange,
        "choice",
        lambda self, size: "allgather" if size == BUCKET else "bfloat16",
    )
    compressor = QSGD(
        bits=4,
        norm="linf",
        bucket_size=BUCKET,
        min_numel=0,
        fusion_bytes=4 * sizes[0],
        exchange="auto",
        seed=next(SEEDS),
    )
    trained(compressor, sizes)
    first, second = (g.double().numpy() for g in gradients_of(hvd.rank(), sizes))
    error = error_of(first, compressor.levels.numpy())
    error += np.sum((as_bfloat16(second).astype(np.float64) - second) ** 2)
    wanted = error / (np.sum(first**2) + np.sum(second**2))
    assert compressor.report()["relative_error"] == pytest.approx(wanted, rel=1e-3)
