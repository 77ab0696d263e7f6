"""Samples of what is quantised under exchange="hierarchical": a node's mean, each rank a slice."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hvd_adaptive import ALQ
from hvd_adaptive.exchange.auto import AutoExchange
from hvd_adaptive.exchange.exchange import RankInfo
from hvd_adaptive.exchange.hierarchical import HierarchicalExchange
from hvd_adaptive.layout import Group
from hvd_adaptive.run.draws import Draws

NODES = (0, 0, 1, 1)
BUCKET = 64


def exchanges(kind: str) -> list:
    places = [RankInfo(4, rank, NODES) for rank in range(4)]
    if kind == "hierarchical":
        return [HierarchicalExchange(place) for place in places]
    made = [AutoExchange(RankInfo(4, rank)) for rank in range(4)]
    for auto in made:
        auto.know_nodes(NODES, ALQ().parts.default)
        slow = dict.fromkeys(("float32", "bfloat16", "scatter_reduce"), (9.0, 99.0))
        # Small groups go by allgather, large ones by the nodes' means.
        auto.choose_by(slow | {"allgather": (0.001, 9.0), "hierarchical": (0.002, 0.003)})
    return made


def sampled(made, groups, flats, count: int, step: int) -> list:
    """What each rank's sample is, from what ranks of its node send it."""
    found = []
    for exchange in made:
        shares = Draws(
            exchange,
            groups,
            bucket_size=BUCKET,
            count=count,
            key_of=lambda rank: 1000 * step + rank,
        )
        drawn = {
            member: shares.draw(
                exchange.rank, lambda group, member=member: flats[member][id(group)]
            )
            for member in shares.members
        }
        received = [shares.shared(drawn[member]) for member in shares.members]
        own = drawn[exchange.rank]
        found.append(shares.averaged(own, received) if len(drawn) > 1 else own)
    return found


def gradients(groups, seed: int) -> list[dict]:
    """Of each rank, by group: what ranks of a node have in common, and ten times as much that their
    mean does not have."""
    found: list[dict] = [{} for _ in range(4)]
    for place, group in enumerate(groups):
        for node in (0, 1):
            generator = torch.Generator().manual_seed(100 * seed + 10 * place + node)
            common = torch.randn(group.quantized, generator=generator)
            apart = 10 * torch.randn(group.quantized, generator=generator) ** 3
            found[2 * node][id(group)] = common + apart
            found[2 * node + 1][id(group)] = common - apart
    return found


GROUPS = {
    "one bucket": [30],
    "odd": [5 * BUCKET + 7],
    "several": [5 * BUCKET + 7, BUCKET, 40, 12 * BUCKET, 3 * BUCKET + 1],
}


@pytest.mark.parametrize("case", GROUPS)
def test_buckets_are_slices_of_exact_means(case):
    groups = [Group(torch.float32, size) for size in GROUPS[case]]
    flats = gradients(groups, 1)
    total = sum(-(-size // BUCKET) for size in GROUPS[case])
    for node in (0, 1):
        members = exchanges("hierarchical")[2 * node : 2 * node + 2]
        found = [b for sample in sampled(members, groups, flats, 100, 3) for b in sample]
        means = [
            (flats[2 * node][id(g)].double() + flats[2 * node + 1][id(g)].double()) / 2
            for g in groups
        ]
        wanted = [bucket for mean in means for bucket in mean.split(BUCKET)]
        assert len(found) == len(wanted) == total
        left = [b.tolist() for b in found]
        for bucket in wanted:
            match = [
                b
                for b in left
                if len(b) == len(bucket) and np.allclose(b, bucket, rtol=1e-5, atol=1e-4)
            ]
            assert len(match) == 1
            left.remove(match[0])


@pytest.mark.parametrize("kind", ["hierarchical", "auto"])
def test_weighted_sums_of_all_ranks_estimate_those_over_all_that_is_quantised(kind):
    """Sums of squared norms, whose expectation is exact in NumPy; 300 draws, 5 sigma. Ranks' slices
    hold different numbers of buckets."""
    sizes = [5 * BUCKET + 7, *[BUCKET] * 6, 30, 200 * BUCKET + 5]
    groups = [Group(torch.float32, size) for size in sizes]
    flats = gradients(groups, 2)
    made = exchanges(kind)
    by_allgather = kind == "auto"

    def quantised() -> list[np.ndarray]:
        """Buckets, each as often as ranks quantise it."""
        found = []
        for group in groups:
            own = [flats[rank][id(group)].double().numpy() for rank in range(4)]
            plain = by_allgather and made[0].choice(group.coordinates) == "allgather"
            rows = own if plain else [(own[0] + own[1]) / 2, (own[2] + own[3]) / 2]
            found += [b for row in rows for b in np.split(row, range(BUCKET, row.size, BUCKET))]
        return found

    if by_allgather:
        assert {made[0].choice(g.coordinates) for g in groups} == {"allgather", "hierarchical"}
    everything = quantised()
    wanted = sum(np.sum(b**2) for b in everything) / len(everything)
    ratios = []
    for step in range(300):
        samples = sampled(made, groups, flats, 6, step)
        sums = [
            (w * float(b.double().square().sum()), w)
            for sample in samples
            for b, w in zip(sample, sample.weights, strict=True)
        ]
        ratios.append(np.sum(sums, axis=0))
    squares, weights = np.array(ratios).T
    # Weights alone are no estimate: their sum is what it is at every draw.
    np.testing.assert_allclose(weights, weights[0], rtol=1e-9)
    found = squares / weights
    assert abs(found.mean() - wanted) <= 5 * found.std() / np.sqrt(300)


def test_damaged_samples_are_left_out(caplog):
    """Without an error: the other ranks wait for this one's statistics."""
    exchange, groups = exchanges("hierarchical")[0], [Group(torch.float32, 8 * BUCKET)]
    shares = Draws(exchange, groups, bucket_size=BUCKET, count=4, key_of=lambda rank: rank)
    drawn = shares.draw(0, lambda group: torch.ones(8 * BUCKET))
    sent = shares.shared(drawn)
    assert sent.numel() and len(shares.averaged(drawn, [sent, sent])) == len(drawn)
    assert shares.averaged(drawn, [sent, sent[:-1]]) == [] and "damaged" in caplog.text


def test_shared_is_empty_if_nothing_was_drawn():
    """So that a rank whose share is empty sends nothing, not a number that no other one sends."""
    exchange = exchanges("hierarchical")[0]
    shares = Draws(exchange, [], bucket_size=BUCKET, count=4, key_of=lambda rank: rank)
    assert shares.shared(shares.draw(0, lambda group: torch.ones(0))).numel() == 0
