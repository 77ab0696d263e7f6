"""When averages of 8 bits add an error that matters: one line, on one rank."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from scheme_cases import scheme
from test_auto import chosen
from test_second_stage import COORDINATES, laplacian, normal, squared_error

from hvd_adaptive import QSGD, ScatterReduce
from hvd_adaptive.codec import second_stage
from hvd_adaptive.coding.payload import SIZE
from hvd_adaptive.exchange.exchange import RankInfo
from hvd_adaptive.exchange.hierarchical import HierarchicalExchange
from hvd_adaptive.exchange.scatter_reduce import ScatterReduceExchange
from hvd_adaptive.layout import Group

GROUPS = [Group(torch.float32, 1 << 20, 0)]
# 8 bits, of which averages need more.
FINE = ("qsgd-8-linf", "eden-8", "ecdq-variance0.0001")


def coarse(**keywords) -> QSGD:
    """A scheme whose averages of b bits have b steps only: 8 bits, and more would be worth it."""
    compressor = QSGD(bits=5, norm="linf", **keywords)
    compressor.parts.default.second_codec = lambda bits: (
        QSGD(intervals=bits, norm="linf").parts.default
    )
    return compressor


@pytest.fixture
def warnings(caplog, monkeypatch):
    monkeypatch.setattr(second_stage, "_looked_at", set())
    monkeypatch.setattr(second_stage, "_chosen", {})
    caplog.set_level(logging.WARNING, "hvd_adaptive")

    def found() -> list[str]:
        """Of averages: kernels that are compiled have lines, too."""
        told = [record.getMessage() for record in caplog.records]
        return [line for line in told if "averages over" in line or "second stage" in line]

    return found


def choose(way, **keywords) -> None:
    way.log_choices(GROUPS, coarse(**keywords).parts)


def named(line: str) -> tuple[float, float]:
    """The error and the share of a warning."""
    found = re.search(r"error of up to (\S+) for .* coordinates, (\S+) times", line)
    return float(found[1]), float(found[2])


def added(make, ranks: int, aligned: bool) -> tuple[float, float]:
    """What a scatter-reduce of Laplacian gradients adds to the average's square, and to the error
    of an allgather, as a share."""
    one, two = (
        squared_error(make(exchange=exchange), ranks, aligned, 4, draw=laplacian)
        for exchange in ("allgather", "scatter_reduce")
    )
    square = sum(float(laplacian(step).double().square().sum()) for step in range(4))
    average = (square if aligned else square / ranks) + one
    return (two - one) / average, (two - one) / one


@pytest.mark.parametrize("name", FINE)
def test_a_negligible_error_is_not_worth_a_line(name, warnings):
    """Averages of 4 ranks have more than 1.25 times the error, and that is next to nothing."""
    one, two = (
        scheme(name, bucket_size=4096, exchange=exchange)()
        for exchange in ("allgather", "scatter_reduce")
    )
    first, both = (squared_error(each, 4, True, 1) for each in (one, two))
    square = float(normal(0).double().square().sum())
    assert both - first > second_stage.SHARE * first
    assert (both - first) / square < second_stage.NEGLIGIBLE / 10
    assert two.parts.default.second_stage(4).bits == 8
    assert warnings() == []


def test_the_error_that_is_named(warnings):
    """Against Laplacian gradients, alike and independent, that are exchanged in both ways. Buckets'
    largest coordinates, which are their scales, differ from the reference's."""
    both = [added(coarse, 4, aligned) for aligned in (True, False)]
    (line,) = warnings()
    assert "averages over 4 ranks: 8 bits" in line
    assert named(line) == pytest.approx(
        [max(values) for values in zip(*both, strict=True)], rel=0.3
    )


def test_once_on_one_rank_and_not_of_bits_that_were_asked_for(warnings):
    for rank in (1, 2, 3):
        choose(ScatterReduceExchange(RankInfo(4, rank)))
    for bits in (4, 8, 32):
        stage = ScatterReduce(second_stage_bits=bits)
        choose(ScatterReduceExchange(RankInfo(4, 0)), exchange=stage)
    choose(HierarchicalExchange(RankInfo(4, 0, (0, 0, 1, 1))))  # two nodes gather
    assert warnings() == []
    for _ in range(2):
        choose(ScatterReduceExchange(RankInfo(4, 0)))
    assert len(warnings()) == 1


@pytest.mark.parametrize("ranks", [2, 4, 8, 10, 64])
def test_the_cheaper_remedy(ranks, warnings):
    """By lengths of bodies: b (N - 1) bits by allgather, (b + 32)(N - 1)/N with the other."""
    codec, v = coarse().parts.default, normal(0)
    own = 8 * (codec.payloads.encode(v, COORDINATES, 1).bytes.numel() - SIZE) / COORDINATES
    both = {
        "exchange='allgather'": own * (ranks - 1),
        "exchange=ScatterReduce(second_stage_bits=32)": (own + 32) * (ranks - 1) / ranks,
    }
    choose(ScatterReduceExchange(RankInfo(ranks, 0)))
    (line,) = warnings()
    name, sent = re.search(r"first stage's; (\S+) adds none, and sends ([\d.]+)", line).groups()
    assert name == min(both, key=both.get)
    assert float(sent) == pytest.approx(both[name], rel=0.01)
    assert ("allgather" in name) == (ranks <= 7)  # N < 1 + 32/b


def test_nodes_are_counted_not_ranks(warnings):
    nodes = (0, 0, 1, 1, 2, 2)
    for rank in range(6):
        choose(HierarchicalExchange(RankInfo(6, rank, nodes)))
    (line,) = warnings()
    assert (
        "averages over 3 nodes" in line
        and "exchange=Hierarchical(second_stage_bits=32) adds none" in line
    )


@pytest.mark.parametrize("label", ["allgather", "scatter_reduce"])
def test_auto_speaks_of_what_it_has_chosen(label, warnings):
    seconds = dict.fromkeys(("float32", "bfloat16", "allgather", "scatter_reduce"), (1.0, 9.0))
    choose(chosen(RankInfo(4, 0), seconds | {label: (0.1, 0.2)}))
    assert len(warnings()) == (label == "scatter_reduce")
