"""Whole steps beside the cost model's parts; the ranks themselves are played."""

from __future__ import annotations

import dataclasses

import pytest
from plan_machines import AVERAGES, LINK, N, machine

from hvd_adaptive.tools import launch
from hvd_adaptive.tools.bench.exchange import Measured
from hvd_adaptive.tools.plan import steps
from hvd_adaptive.tools.plan.model import predict
from hvd_adaptive.tools.plan.quantities import Averages, Cluster, Codec, Conditions, Job

CODEC = Codec("qsgd(bits=4,)", 8.0, 1e-6, 2e-6, 0.1, Averages(16.0, 4e-6, 8e-6, 6), AVERAGES)
WRITTEN = (
    "float32",
    "float16",
    "QSGD(bits=4, exchange='allgather')",
    "QSGD(bits=4, exchange='scatter_reduce', second_stage_bits=6)",
)


@pytest.fixture
def steps_here(monkeypatch):
    """Of ranks on two cores, each method three times as long as its parts; what was asked for,
    methods with which ranks fail, and {launches so far: how many times as long instead, None where
    ranks fail}."""
    asked, failing, slower = [], set(), {}

    def measured(methods, tensors, coordinates, count, place, limit):
        times = slower.get(len(asked), 3.0)
        asked.append((list(methods), tensors, coordinates, place))
        if times is None or failing & set(methods):
            raise launch.RanksError("mpirun ended with status 1")
        job = Job(tensors, coordinates)
        own = machine(CODEC, scheme_step_s=1.0, stock_step_s=0.5)
        parts = [p.step_s for p in steps.without_wire(own, job, place.count)]
        seconds = dict(zip(WRITTEN, parts, strict=True))
        return [Measured(m, times * seconds[m], (0.0, 0.0)) for m in methods], {}

    monkeypatch.setattr(steps.exchange, "measure", measured)
    monkeypatch.setattr(steps, "_cores", lambda: 2)
    monkeypatch.setattr(steps, "AT_ONCE", 3)
    return asked, failing, slower


def test_whole_steps_tell_how_much_longer_the_parts_take_together(steps_here):
    """Ranks that crowd this machine as the cluster's its hosts; the wire is not slowed."""
    asked, *_ = steps_here
    own = machine(CODEC, scheme_step_s=1.0, stock_step_s=0.5)
    cluster, job = Cluster(8, LINK, latency=0.0, cores=0.5), Job(4, 10 * N)
    # In four ranks on two cores each has half of one.
    assert [p.step_s for p in steps.without_wire(own, job, 4)][:2] == [1.0, 1.0]
    found = steps.factors(own, Conditions(8, 8, 4, 10 * N, cluster.crowd), lambda what: None)
    three = pytest.approx(3.0)
    assert found == {
        "float32": {"ring": three},
        "float16": {"ring": three},
        CODEC.label: {"allgather": three, "scatter_reduce": three},
    }
    # With the second stage of eight ranks.
    assert [methods for methods, *_ in asked] == [list(WRITTEN[:3]), [WRITTEN[3]]] * steps.LAUNCHES
    assert all(a[1:3] == (4, 10 * N) and (a[3].count, a[3].tcp) == (4, True) for a in asked)
    slow = dataclasses.replace(own, factors=found)
    for before, after in zip(predict(cluster, job, own), predict(cluster, job, slow), strict=True):
        assert after.processor_s == pytest.approx(3 * before.processor_s)
        assert after.wire_s == before.wire_s


def test_a_method_that_ranks_fail_with_is_told_and_has_no_factor(steps_here, caplog):
    asked, failing, _ = steps_here
    failing.add(WRITTEN[2])
    own = machine(CODEC, scheme_step_s=1.0, stock_step_s=0.5)
    found = steps.factors(own, Conditions(2, 2, 4, N), lambda what: None)
    assert set(found) == {"float32", "float16", CODEC.label}
    assert set(found[CODEC.label]) == {"scatter_reduce"}
    assert [len(methods) for methods, *_ in asked] == [3, 1, 1, 1, 1, 3, 3]
    assert f"{WRITTEN[2]}: no whole step could be measured" in caplog.text
    failing.add("float32")
    with pytest.raises(launch.RanksError):
        steps.factors(own, Conditions(2, 2, 4, N), lambda what: None)


def test_of_several_launches_medians_count(steps_here, monkeypatch):
    """Two batches in turn, three times; the second batch's second launch fails."""
    asked, _, slower = steps_here
    slower |= {0: 9.0, 2: 1.0, 4: 4.0, 1: 5.0, 3: None, 5: 7.0}
    own = machine(CODEC, scheme_step_s=1.0, stock_step_s=0.5)
    conditions = Conditions(2, 2, 4, N)
    found = steps.factors(own, conditions, lambda what: None)
    assert found["float32"]["ring"] == pytest.approx(4.0)
    assert found[CODEC.label]["scatter_reduce"] == pytest.approx(6.0)
    assert len(asked) == 6
    monkeypatch.setattr(steps, "ENOUGH", -1.0)
    steps.factors(own, conditions, lambda what: None)
    assert len(asked) == 8


@pytest.mark.parametrize(
    ("method", "written"),
    [
        ("ALQ", "ALQ(exchange='allgather')"),
        ("alq(exchange='hierarchical', ranks_per_node=4)", "ALQ(exchange='allgather')"),
        ("ALQ(warmup_steps=9, clip=2.5)", "ALQ(clip=2.5, exchange='allgather')"),
    ],
)
def test_steps_are_of_the_exchange_that_is_predicted(steps_here, method, written):
    own = machine(dataclasses.replace(CODEC, label=method))
    prediction = predict(Cluster(2, LINK), Job(1, N), own)[2]
    assert steps._written(prediction, own.codecs[0]) == written


@pytest.mark.parametrize(
    ("count", "per_host", "cores", "here"),
    [(16, 1, 8.0, 2), (8, 1, 0.25, 8), (4, 4, 1.0, 4), (2, 2, 0.5, 2), (64, 1, 0.01, 8)],
)
def test_as_many_ranks_here_as_crowd_a_host(monkeypatch, count, per_host, cores, here):
    monkeypatch.setattr(steps, "_cores", lambda: 2)
    crowd = Cluster(count, LINK, per_host, cores=cores).crowd
    assert steps.ranks_here(Conditions(count, count // per_host, 1, 1, crowd)) == here


@pytest.mark.parametrize(
    ("given", "exchanged"), [((100, 10**9), (100, steps.NUMBERS)), ((9, 5), (5, 5))]
)
def test_of_a_large_model_a_part_is_exchanged_here(steps_here, given, exchanged):
    asked, *_ = steps_here
    own = machine(CODEC, scheme_step_s=1.0, stock_step_s=0.5)
    steps.factors(own, Conditions(2, 2, *given), lambda what: None)
    assert asked[0][1:3] == exchanged


def test_hierarchical_is_as_slow_as_scatter_reduce():
    own = machine(factors={"A()": {"allgather": 2.0, "scatter_reduce": 3.0}})
    kinds = ("allgather", "scatter_reduce", "hierarchical")
    assert [own.factor("A()", kind) for kind in kinds] == [2.0, 3.0, 3.0]
    assert own.factor("B()", "allgather") == 1.0
