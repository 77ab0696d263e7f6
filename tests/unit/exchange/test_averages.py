"""The generators of exchanges: each callable alone, and what they keep while a collective runs."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parcels import outcomes, parcel

from hvd_adaptive import QSGD, PayloadError, ScatterReduce
from hvd_adaptive.exchange.auto import Plain
from hvd_adaptive.exchange.exchange import AllgatherExchange, FailedElsewhereError, RankInfo
from hvd_adaptive.exchange.hierarchical import HierarchicalExchange
from hvd_adaptive.exchange.scatter_reduce import ScatterReduceExchange, ShardReduce, cut
from hvd_adaptive.kernels.random import stream_key
from hvd_adaptive.monitor import StepMeter

RANKS, BUCKET, STEPS = 4, 64, 127
# A codec of many levels: its error is at most a step of a bucket's largest coordinate.
CODEC = QSGD(
    intervals=STEPS, norm="linf", bucket_size=BUCKET, exchange=ScatterReduce(second_stage_bits=8)
).parts.default
KINDS = {
    "allgather": lambda rank: AllgatherExchange(RankInfo(RANKS, rank)),
    "scatter_reduce": lambda rank: ScatterReduceExchange(RankInfo(RANKS, rank)),
    "pairs": lambda rank: HierarchicalExchange(RankInfo(RANKS, rank, (0, 0, 1, 1))),
    "one node": lambda rank: HierarchicalExchange(RankInfo(RANKS, rank, (0, 0, 0, 0))),
    "alone": lambda rank: HierarchicalExchange(RankInfo(RANKS, rank, (0, 1, 2, 3))),
    "float32": lambda rank: Plain(RankInfo(RANKS, rank)),
    "bfloat16": lambda rank: Plain(RankInfo(RANKS, rank), torch.bfloat16),
}


def drawn(size: int, dtype=torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    return [torch.randn(size, generator=generator).to(dtype) for _ in range(RANKS)]


def sent(flats, quantized, **own):
    return [parcel(CODEC, flat, quantized, 1 / RANKS, **own) for flat in flats]


def begun(method: str, ways, parcels, flats) -> list:
    """What each rank does, "average" or "reduce"."""
    return [
        getattr(way, method)(own, flat, flat[: own.quantized])
        for way, own, flat in zip(ways, parcels, flats, strict=True)
    ]


# Buckets: none, fewer than ranks, as many, and a partial one; without and with a full section.
@pytest.mark.parametrize("full", [0, 3, 90])
@pytest.mark.parametrize("quantized", [0, 50, 128, 256, 999])
def test_reduce_alone_gives_each_rank_the_average_of_its_chunk(quantized, full):
    flats = drawn(quantized + full)
    ways = map(KINDS["scatter_reduce"], range(RANKS))
    found = outcomes(begun("reduce", ways, sent(flats, quantized), flats))
    exact = torch.stack(flats).double().mean(dim=0)
    bound = max((float(flat.abs().max()) for flat in flats if flat.numel()), default=0) / STEPS
    for chunk, mean in zip(cut(quantized, full, BUCKET, RANKS), found, strict=True):
        assert mean.dtype == torch.float32 and mean.numel() == chunk.coordinates
        own, rest = exact[chunk.begin : chunk.end], exact[chunk.full_begin : chunk.full_end]
        assert torch.allclose(mean[: len(own)].double(), own, rtol=0, atol=bound)
        assert torch.allclose(mean[len(own) :].double(), rest, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["scatter_reduce", "float32", "bfloat16"])
def test_reduce_then_gather_are_the_average(kind):
    flats, ways = drawn(1000), [KINDS[kind](rank) for rank in range(RANKS)]
    parcels = sent(flats, 900)
    whole = outcomes(begun("average", ways, parcels, flats))
    means = outcomes(begun("reduce", ways, parcels, flats))
    parts = outcomes([w.gather(p, m) for w, p, m in zip(ways, parcels, means, strict=True)])
    for one, two in zip(whole, parts, strict=True):
        assert torch.equal(one, whole[0]) and torch.equal(one, two)


def test_what_reduce_could_not_read_ends_gather_on_all_ranks():
    flats, parcels = drawn(1000), sent(drawn(1000), 900)
    ways = [ScatterReduceExchange(RankInfo(RANKS, rank)) for rank in range(RANKS)]
    means = outcomes(begun("reduce", ways, parcels, flats))
    means[2] = PayloadError("rank 0's payload is damaged")
    found = outcomes([w.gather(p, m) for w, p, m in zip(ways, parcels, means, strict=True)])
    assert found[2] is means[2]
    for rank in (0, 1, 3):
        assert isinstance(found[rank], FailedElsewhereError) and "rank 2" in str(found[rank])


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_that_is_borrowed_is_kept_while_a_collective_runs(kind):
    """Values with residuals may be copies of gradients; many groups are in flight."""
    (flat, *_) = drawn(1000, torch.float64)
    values = flat[:900].float()
    kept = [weakref.ref(flat), weakref.ref(values)]
    way = KINDS[kind](0).average(parcel(CODEC, flat, 900, 1 / RANKS), flat, values)
    del flat, values
    assert all(ref() is not None for ref in kept)
    request = next(way)
    gc.collect()
    assert [ref() for ref in kept] == [None, None]
    if kind not in ("allgather", "alone"):  # an alltoall
        parts = getattr(request, "request", request).parts
        memory = [weakref.ref(part.bytes) for part in parts]
        del parts
        request = request.waiting()
        gc.collect()
        assert [ref() for ref in memory] == [None] * len(memory), "the network alone keeps it"


@pytest.mark.parametrize("kind", ["allgather", "scatter_reduce"])
def test_ranks_that_exchange_are_named_by_the_parcel(kind):
    """Ranks 5, 3, 8 and 2 of a larger job, in this order; their keys are their own."""
    make, numbers, flats = KINDS[kind], (5, 3, 8, 2), drawn(1000)
    parcels = sent(flats, 900, ranks=numbers)
    assert [parcels[0].key(rank) for rank in range(4)] == [stream_key(0, n, 0, 0) for n in numbers]
    found = outcomes(begun("average", map(make, range(RANKS)), parcels, flats))
    assert torch.allclose(found[0], torch.stack(flats).mean(dim=0), atol=0.1)
    # A rank that takes them for ranks 0 to 3 sees payloads of others.
    parcels = [*parcels[:3], *sent(flats, 900)[3:]]
    found = outcomes(begun("average", map(make, range(RANKS)), parcels, flats))
    assert all(isinstance(error, PayloadError) for error in found)


def test_payloads_are_counted_once():
    (flat, *_), meter = drawn(1000), StepMeter()
    own = parcel(CODEC, flat, 900, 1 / RANKS, meter=meter, index=3)
    request = next(KINDS["allgather"](0).average(own, flat, flat[:900]))
    meter.finish()
    assert meter.report()["payload_bytes"] == request.data.size
    assert 0 < meter.report()["relative_error"] < 1e-3


@given(st.integers(0, 2000), st.integers(0, 300), st.integers(1, 700), st.integers(1, 9))
def test_chunks_cover_a_group_in_order(quantized, full, bucket, owners):
    """Each coordinate once, ends at bucket boundaries, sizes as even as whole buckets allow."""
    chunks = cut(quantized, full, bucket, owners)
    assert len(chunks) == owners
    flat = torch.arange(quantized + full, dtype=torch.float64)
    out, taken = torch.full_like(flat, -1), []
    for chunk in chunks:
        taken.append(flat.new_empty(chunk.coordinates))
        chunk.take(flat, taken[-1])
        chunk.put(taken[-1], out)
    assert torch.equal(out, flat) and sum(map(len, taken)) == len(flat)
    in_order = [t[: c.quantized] for t, c in zip(taken, chunks, strict=True)]
    in_order += [t[c.quantized :] for t, c in zip(taken, chunks, strict=True)]
    assert torch.equal(torch.cat(in_order), flat)
    assert all(c.begin % bucket == 0 or c.begin == quantized for c in chunks)
    buckets = [-(-c.quantized // bucket) for c in chunks]
    assert sum(buckets) == -(-quantized // bucket)
    assert max(buckets) - min(buckets) <= 1
    assert max(c.full for c in chunks) - min(c.full for c in chunks) <= 1


def test_shards_are_even_parts_of_both_sections():
    chunks = ShardReduce(RankInfo(3, 1))._chunks(CODEC, 12, 6)
    found = [(c.begin, c.end, c.full_begin, c.full_end) for c in chunks]
    assert found == [(0, 4, 12, 14), (4, 8, 14, 16), (8, 12, 16, 18)]
