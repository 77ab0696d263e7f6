"""Exchanges: which one is chosen, what it sends, and what reports and tables are made of if a rank
quantises another vector than its gradient: nodes' means, plain numbers. Errors are exact ones."""

from __future__ import annotations

import logging
import math
from unittest.mock import patch

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from exact_errors import bucket_errors
from nets import Given
from training import assert_same_everywhere, distributed, flat_parameters, learn, make_model, train

from hvd_adaptive import ALQ, QSGD, Auto, Hierarchical, SparseSGD, instances
from hvd_adaptive.exchange import auto

pytestmark = pytest.mark.ranks
BUCKET = 512
# Coordinates of two tensors, each a group: two full buckets and a partial one for each of two
# slices at most, all of which are measured.
LARGE, SMALL = 4 * BUCKET + 100, 2 * BUCKET
OF_ALL = {"bits": 4, "bucket_size": BUCKET, "min_numel": 0}


@pytest.mark.parametrize("scheme", ["feedback", "nodes"])
def test_auto_measures_once_and_all_ranks_choose_alike(scheme, caplog):
    model, compressor = make_model(), QSGD(bits=4, error_feedback=0.2, exchange="auto")
    if scheme == "nodes":
        exchange = Auto(ranks_per_node=max(1, hvd.size() // 2))
        compressor = SparseSGD(density=0.1, exchange=exchange)
    optimizer = distributed(model, compressor, lr=0.3)
    with caplog.at_level(logging.INFO, "hvd_adaptive"):
        assert learn(model, optimizer) < 0.9
    assert caplog.text.count("take, in milliseconds") == 1
    lines = compressor._training.connection._binding.exchange._lines
    assert_same_everywhere(model, torch.tensor(list(lines.values())))
    assert compressor.report()["wire_bytes"] > 0


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_exchange_without_exchange(ranks, monkeypatch, caplog):
    """Up to ``ranks`` ranks allgather, beyond scatter_reduce; report() and the log name it."""
    monkeypatch.setattr(auto, "FEW_RANKS", ranks)
    expected = "allgather" if hvd.size() <= ranks else "scatter_reduce"
    found = []
    for exchange in (None, expected):
        instances.start_over()
        model, compressor = make_model(), ALQ(bits=4, exchange=exchange)
        with caplog.at_level("INFO", logger="hvd_adaptive"):
            train(model, distributed(model, compressor), 3)
        assert compressor.report()["exchange"] == expected
        found.append(flat_parameters(model))
    assert torch.equal(*found)
    lines = [r.getMessage() for r in caplog.records if "exchange=None" in r.getMessage()]
    assert lines == [f"exchange=None: {expected}, for {hvd.size()} ranks"]


def test_as_many_bytes_as_are_sent():
    """What Horovod's alltoall and allgather were given, less what stays here."""
    model, compressor = make_model(), ALQ(exchange="scatter_reduce")
    optimizer = distributed(model, compressor)
    train(model, optimizer, 2)
    with (
        patch.object(hvd, "alltoall_async", wraps=hvd.alltoall_async) as alltoall,
        patch.object(hvd, "allgather_async", wraps=hvd.allgather_async) as allgather,
    ):
        train(model, optimizer, 1)
    sent = [call.args[0].numel() - int(call.args[1][hvd.rank()]) for call in alltoall.mock_calls]
    gathered = [call.args[0] for call in allgather.mock_calls]
    # Payloads, not what ranks tell each other at the end.
    sent += [g.numel() * (hvd.size() - 1) for g in gathered if g.dtype == torch.uint8]
    report = compressor.report()
    assert report["wire_bytes"] == sum(sent) > 0
    coordinates = sum(p.numel() for p in model.parameters())
    assert report["coordinates"] == coordinates
    second = compressor.parts.default.second_stage(hvd.size()).bits
    both = coordinates * (3 + second) / 8 * (hvd.size() - 1) / hvd.size()
    assert report["wire_bytes"] == pytest.approx(both, rel=0.25)


@pytest.fixture
def nodes():
    if hvd.size() != 4:
        pytest.skip("needs two nodes of two ranks")
    return Hierarchical(ranks_per_node=2)


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


def trained(compressor, sizes, steps: int = 1) -> list[torch.Tensor]:
    model = Given(sizes)
    optimizer = distributed(model, compressor, lr=1.0)
    for _ in range(steps):
        optimizer.zero_grad()
        model(gradients_of(hvd.rank(), sizes)).backward()
        optimizer.step()
    assert_same_everywhere(model)
    return [p.grad for p in model.parameters()]


def error_of(v: np.ndarray, levels: np.ndarray) -> float:
    """E||Q(v) - v||² of L-infinity buckets laid end to end."""
    return float(bucket_errors(v, levels, BUCKET, "linf").sum())


def choose(monkeypatch, choice) -> None:
    """As if ``choice(coordinates)`` had been measured to be the fastest."""
    monkeypatch.setattr(auto, "measure", lambda *of: 1.0)
    monkeypatch.setattr(auto.AutoExchange, "choice", lambda self, size: choice(size))


@pytest.mark.nodes
@pytest.mark.parametrize("tensors", [(LARGE,), (BUCKET,), (LARGE, SMALL)], ids=str)
def test_the_error_told_is_that_of_this_ranks_slice_of_the_mean(tensors, nodes):
    compressor = QSGD(norm="linf", fusion_bytes=4 * 17 * BUCKET, exchange=nodes, **OF_ALL)
    trained(compressor, tensors)
    node, place = divmod(hvd.rank(), 2)
    error = norm = 0.0
    for tensor, size in enumerate(tensors):
        buckets = -(-size // BUCKET)
        begin, end = (min(size, buckets * p // 2 * BUCKET) for p in (place, place + 1))
        own = node_mean(node, tensor, tensors)[begin:end]
        error, norm = error + error_of(own, compressor.levels.numpy()), norm + np.sum(own**2)
    found = compressor.report()["relative_error"]
    if norm:
        assert found == pytest.approx(error / norm, rel=1e-3)
    else:  # one bucket: the other rank of the node quantises it
        assert math.isnan(found) and tensors == (BUCKET,)


@pytest.mark.nodes
def test_tables_are_fitted_to_each_ranks_gradient(nodes):
    """Every bucket is sampled: the table is that of a fit, by one process, to all gradients."""
    sizes = (16 * BUCKET, 2 * BUCKET)
    compressor = ALQ(exchange=nodes, samples=100, fusion_bytes=4 * sizes[0], **OF_ALL)
    trained(compressor, sizes)
    wanted = ALQ(**OF_ALL)
    wanted.fit([g for rank in range(4) for g in gradients_of(rank, sizes)])
    assert compressor.parts.default.table_version == 1
    np.testing.assert_allclose(compressor.levels.numpy(), wanted.levels.numpy(), rtol=1e-4)
    assert_same_everywhere(compressor.levels)


def test_a_few_samples_of_a_few_ranks_are_enough_for_all():
    """One bucket, which one rank of each node quantises: the other has no sample, nobody waits."""
    exchange = Hierarchical(ranks_per_node=2 if hvd.size() == 4 else 1)
    compressor = ALQ(exchange=exchange, update_steps=[0, 1, 2], **OF_ALL)
    trained(compressor, (BUCKET,), steps=4)
    assert compressor.parts.default.table_version == 3
    assert_same_everywhere(compressor.levels)


def test_ranks_of_one_node_have_no_error_and_fit_nothing():
    sizes = (LARGE, SMALL)
    compressor = ALQ(bucket_size=BUCKET, exchange="hierarchical")
    averages = trained(compressor, sizes)
    report = compressor.report()
    assert report["relative_error"] == report["wire_bytes"] == report["payload_bytes"] == 0
    assert compressor.parts.default.table_version == 0
    for place, average in enumerate(averages):
        rows = [gradients_of(rank, sizes)[place].double() for rank in range(hvd.size())]
        exact = torch.stack(rows).mean(0)
        torch.testing.assert_close(average.double(), exact, rtol=1e-5, atol=1e-4)


def bfloat16_error(v: np.ndarray, levels: np.ndarray) -> float:
    """Of rounding to the nearest number."""
    return float(np.sum((torch.from_numpy(v).bfloat16().double().numpy() - v) ** 2))


ERRORS = {
    "float32": lambda v, levels: 0.0,
    "bfloat16": bfloat16_error,
    "allgather": error_of,
}


@pytest.mark.parametrize(
    ("labels", "warmup"),
    [
        (("float32", "float32"), 0),
        (("float32", "float32"), 1),
        (("bfloat16", "bfloat16"), 0),
        (("bfloat16", "bfloat16"), 1),
        (("allgather", "bfloat16"), 0),
    ],
)
def test_plain_and_quantised_groups_weigh_as_their_gradients(labels, warmup, monkeypatch):
    """The error of plain groups is that of rounding, or zero."""
    # The first tensor, which the backward pass reaches last, is cut into two groups.
    sizes = (2 * BUCKET, BUCKET + 9)
    choose(monkeypatch, lambda size: labels[size != BUCKET])
    keywords = OF_ALL | {"norm": "linf", "fusion_bytes": 4 * sizes[0], "warmup_steps": warmup}
    compressor = QSGD(exchange="auto", **keywords)
    trained(compressor, sizes)
    own = [g.double().numpy() for g in gradients_of(hvd.rank(), sizes)]
    levels = compressor.levels.numpy()
    error = sum(ERRORS[label](v, levels) for label, v in zip(labels, own, strict=True))
    wanted = error / sum(np.sum(v**2) for v in own)
    assert compressor.report()["relative_error"] == pytest.approx(wanted, rel=1e-3)
