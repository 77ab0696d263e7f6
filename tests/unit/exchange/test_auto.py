"""exchange="auto": what follows from what was measured, and the plain exchanges."""

from __future__ import annotations

import functools
import logging
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from parcels import parcel

from hvd_adaptive import ALQ, QSGD, Tuning, simulate
from hvd_adaptive.exchange import auto as module
from hvd_adaptive.exchange.auto import SIZES, AutoExchange, Plain
from hvd_adaptive.exchange.exchange import AllgatherExchange, RankInfo
from hvd_adaptive.exchange.hierarchical import HierarchicalExchange
from hvd_adaptive.exchange.scatter_reduce import ScatterReduceExchange
from hvd_adaptive.layout import Group, Member, build_layout
from hvd_adaptive.run.rank_context import RankContext
from hvd_adaptive.simulate.stages import together

CODEC = QSGD(bits=4, bucket_size=512).parts.default


def chosen(
    rank_info: RankInfo, seconds: dict, nodes: tuple[int, ...] = (), codec=CODEC
) -> AutoExchange:
    auto = AutoExchange(rank_info)
    auto.know_nodes(nodes or tuple(range(rank_info.ranks)), codec)
    auto.choose_by(seconds)
    return auto


@pytest.mark.many
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [0, 1, 1000])
@pytest.mark.parametrize("single", [torch.float32, torch.bfloat16])
def test_plain_exchanges_average_in_rank_order(single, size, dtype):
    ranks = 3
    generator = torch.Generator().manual_seed(size)
    flats = [torch.randn(size, generator=generator).to(dtype) for _ in range(ranks)]
    routes = []
    for rank, flat in enumerate(flats):
        exchange = Plain(RankInfo(ranks, rank), single)
        routes.append(exchange.average(parcel(CODEC, flat, size // 2, 1 / ranks), flat, flat))
    found = together(routes)
    sent = single if dtype == torch.float32 else dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total = torch.zeros(size, dtype=wide)
    for flat in flats:
        total += flat.to(sent).to(wide)
    assert found.dtype == dtype
    assert torch.equal(found, (total * (1 / ranks)).to(sent).to(dtype))


def test_the_fastest_for_each_size_and_the_most_exact_of_equals():
    seconds = {
        "float32": (0.0011, 0.100),
        "bfloat16": (0.001, 0.060),
        "allgather": (0.0015, 0.030),
        "scatter_reduce": (0.003, 0.0290),
    }
    auto = chosen(RankInfo(4, 0), seconds)
    assert auto.is_set_up
    assert auto.choice(SIZES[0]) == "bfloat16", "a tenth faster"
    assert auto.choice(SIZES[1]) == "allgather", "within 5 %, and quantised once"
    assert auto.forecast(SIZES[1])["bfloat16"] == pytest.approx(0.060)
    assert auto.forecast(SIZES[0])["scatter_reduce"] == pytest.approx(0.003)
    # Two ranks gather or compress nothing: a scatter-reduce sends as much, and rounds twice.
    del seconds["scatter_reduce"]
    auto = chosen(RankInfo(2, 0), seconds)
    assert list(auto.forecast(SIZES[1])) == list(seconds)
    assert auto.choice(SIZES[1]) == "allgather"


def test_all_ranks_choose_alike_and_plain_groups_quantise_nothing(caplog):
    labels, large = ("float32", "bfloat16", "allgather", "scatter_reduce"), (0.9, 0.5, 0.3, 0.1)
    small, arranged = (0.001, 0.001, 0.002, 0.002), []
    seconds = dict(zip(labels, zip(small, large, strict=True), strict=True))
    groups = [Group(torch.float32, 1 << 20, 7), Group(torch.float32, 900, 100)]
    with caplog.at_level(logging.INFO, "hvd_adaptive"):
        for rank in range(3):
            auto = chosen(RankInfo(3, rank), seconds)
            auto.log_choices(groups, {"": CODEC})
            arranged.append([auto.quantized(group) for group in groups])
    assert arranged == [[1 << 20, 0]] * 3
    assert "1 groups by scatter_reduce" in caplog.text and "1 groups by float32" in caplog.text
    assert "scatter_reduce 2.00 and 100.00" in caplog.text


def test_cannot_be_simulated():
    weight = torch.nn.Parameter(torch.zeros(5000))
    with pytest.raises(ValueError, match="exchange='auto'"):
        simulate.Ranks([("w", weight)], ALQ(exchange="auto"), 2)


def test_measuring_leaves_the_second_stage_alone(monkeypatch):
    """Candidates want such of other bits; a table that was loaded is not to be fitted once more."""
    compressor = ALQ(exchange="auto")
    stage, more = compressor.parts.default.second_stage(2), []

    def measure(exchange, world, codec, size, name, device):
        more.append(codec.second_stage(64).bits)
        return 1.0

    monkeypatch.setattr(module, "measure", measure)
    world = SimpleNamespace(
        gather_equal=lambda own, name: own[None], broadcast=lambda values, name: values
    )
    AutoExchange(RankInfo(2, 0, (0, 1))).set_up(
        world, compressor.parts.default, "test", torch.device("cpu")
    )
    assert set(more) != {stage.bits} and compressor.parts.default.second_stage(2) is stage


@pytest.mark.parametrize(
    ("ranks", "keywords", "nodes", "by_nodes"),
    [
        (2, {}, (), False),
        (5, {}, (), False),
        (4, {"error_feedback": 0.1}, (0, 0, 1, 1), False),
        (4, {}, (0, 1, 2, 3), False),
        (4, {}, (0, 0, 0, 0), False),
        (4, {}, (0, 0, 1, 1), True),
        (4, {}, (), True),
    ],
)
def test_nodes_are_measured_and_bounded_where_there_may_be_any(ranks, keywords, nodes, by_nodes):
    """Nodes have as many ranks each: a prime number of ranks has none to speak of."""
    codec, size = QSGD(bits=4, bucket_size=512, **keywords).parts.default, (512, 0, torch.float32)
    half = functools.partial(Plain, single=torch.bfloat16)
    kinds = [Plain, half, AllgatherExchange] + [ScatterReduceExchange] * (ranks > 2)
    most = max(kind(RankInfo(ranks, 0)).in_flight_bytes(codec, *size) for kind in kinds)
    of_nodes = HierarchicalExchange(RankInfo(ranks, 0)).in_flight_bytes(codec, *size)
    found = AutoExchange(RankInfo(ranks, 0, nodes)).in_flight_bytes(codec, *size)
    assert of_nodes > most and found == (of_nodes if by_nodes else most)
    if nodes:
        seconds = dict.fromkeys(("float32", "bfloat16", "allgather", "scatter_reduce"), (1.0, 2.0))
        seconds |= {"hierarchical": (0.1, 0.2)} if by_nodes else {}
        auto = chosen(RankInfo(ranks, 1), seconds, nodes, codec)
        assert (auto.choice(5) == "hierarchical") == by_nodes


def test_a_layout_that_fits_what_may_be_chosen():
    """Between the bound of a nodes' exchange and the others': two ranks are not refused."""
    scheme = QSGD(bits=4, bucket_size=8192, exchange="auto", tuning=Tuning(in_flight_bytes=160_000))
    groups = RankContext(scheme, SimpleNamespace(size=2, rank=0))
    members = [Member("w", (8192,), torch.float32)]
    layout = groups.build_layout(functools.partial(build_layout, members))
    assert [group.coordinates for group in layout.groups] == [8192]


@pytest.mark.parametrize(
    ("exchange", "ranks", "bucket_size", "helps"),
    [
        ("allgather", 4, 512, True),
        ("allgather", 2, 8192, False),
        ("scatter_reduce", 4, 8192, False),
        ("auto", 4, 512, True),
    ],
)
def test_an_exchange_is_recommended_if_it_helps(exchange, ranks, bucket_size, helps):
    tuning, members = Tuning(in_flight_bytes=4096), [Member("w", (8192,), torch.float32)]
    scheme = QSGD(bits=4, bucket_size=bucket_size, exchange=exchange, tuning=tuning)
    other = QSGD(bits=4, bucket_size=bucket_size, exchange="scatter_reduce", tuning=tuning)
    world, cut = SimpleNamespace(size=ranks, rank=0), functools.partial(build_layout, members)
    with pytest.raises(ValueError, match=r"raise it.* lower bucket_size") as raised:
        RankContext(scheme, world).build_layout(cut)
    assert ("use exchange='scatter_reduce'" in str(raised.value)) == helps
    with nullcontext() if helps else pytest.raises(ValueError, match="two must fit"):
        RankContext(other, world).build_layout(cut)
