"""The cost model by hand, the advice, and `hvd-adaptive plan`."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_adaptive.bench import ranks
from hvd_adaptive.bench.exchange import Measured
from hvd_adaptive.bench.models import MODELS, shapes
from hvd_adaptive.cli import main
from hvd_adaptive.plan import measure, steps
from hvd_adaptive.plan.advice import advise, told
from hvd_adaptive.plan.command import bandwidth
from hvd_adaptive.plan.model import predict
from hvd_adaptive.plan.quantities import (
    Averages,
    Cluster,
    Codec,
    Collective,
    Conditions,
    Job,
    Machine,
)

NOTHING = Collective(0.0, 0.0)
FREE = Codec("ALQ(bits=3)", 3.0, 0.0, 0.0, 0.2, Averages(5.0, 0.0, 0.0), Averages(4.0, 0.0, 0.0))
N = 1_000_000  # of 4 bytes: one group
LINK = 1e6


AVERAGES = Averages(16.0, 4e-6, 8e-6)


def machine(*codecs: Codec, **changes) -> Machine:
    """Whose processor takes no time, but for what is given."""
    nothing = {4: NOTHING, 2: NOTHING}, NOTHING, NOTHING, NOTHING, 0.0, 0.0, 0.0
    base = Machine(*nothing, codecs or (FREE,), 1.0, 1.0, ((LINK, 1.0),))
    return dataclasses.replace(base, **changes)


def seconds(cluster: Cluster, job: Job, own: Machine) -> dict[str, float]:
    """Of a step, by method and exchange."""
    return {f"{p.method} {p.exchange}": p.step_s for p in predict(cluster, job, own)}


@pytest.mark.parametrize("count", [2, 4, 16])
def test_bytes_over_the_link(count):
    found = seconds(Cluster(count, LINK, latency=0.0), Job(1, N), machine())
    assert found == pytest.approx({
        "float32 ring": 2 * (count - 1) / count * 4 * N / LINK,
        "float16 ring": 2 * (count - 1) / count * 2 * N / LINK,
        "ALQ(bits=3) allgather": (count - 1) * 3 / 8 * N / LINK,
        "ALQ(bits=3) scatter_reduce": (count - 1) / count * (3 + 5) / 8 * N / LINK,
    })  # fmt: skip


def test_rings_reach_a_part_of_the_rate():
    cluster = Cluster(4, LINK, latency=0.0)
    found, whole = (
        seconds(cluster, Job(1, N), machine(ring_efficiency=part)) for part in (0.5, 1.0)
    )
    assert found["float32 ring"] == pytest.approx(2 * whole["float32 ring"])
    assert found["ALQ(bits=3) allgather"] == whole["ALQ(bits=3) allgather"]


@pytest.mark.parametrize(
    ("rate", "part"), [(1e3, 0.5), (1e4, 0.5), (1e5, 0.75), (1e6, 1), (1e9, 1)]
)
def test_what_an_allreduce_of_two_reaches_depends_on_the_rate(rate, part):
    own = machine(pair_efficiency=((1e4, 0.5), (1e6, 1.0)), ring_efficiency=0.25)
    found = seconds(Cluster(2, rate, latency=0.0), Job(1, N), own)
    assert found["float32 ring"] == pytest.approx(4 * N / rate / part)
    found = seconds(Cluster(4, rate, latency=0.0), Job(1, N), own)
    assert found["float32 ring"] == pytest.approx(6 * N / rate / 0.25)


def test_an_allgather_of_3_bits_loses_to_a_ring_beyond_21_ranks():
    for count, wins in ((21, True), (22, False)):
        found = seconds(Cluster(count, LINK, latency=0.0), Job(1, N), machine())
        assert (found["ALQ(bits=3) allgather"] < found["float32 ring"]) == wins


def test_messages_have_latency():
    found = seconds(Cluster(4, 1e18, latency=1.0), Job(1, N), machine())
    assert found == pytest.approx({
        "float32 ring": 6, "float16 ring": 6, "ALQ(bits=3) allgather": 3,
        "ALQ(bits=3) scatter_reduce": 6,
    })  # fmt: skip


def test_processor_time_and_what_of_it_is_shared():
    costs = machine(
        Codec("A()", 8.0, 1e-6, 2e-6, 0.1, AVERAGES, AVERAGES),
        allreduce={4: Collective(0.0, 1e-6), 2: NOTHING},
        allgather=Collective(0.5, 1e-6), alltoall=Collective(0.25, 2e-6),
        stock_step_s=0.125, scheme_step_s=0.375,
    )  # fmt: skip
    whole = seconds(Cluster(4, 1e18, latency=0.0), Job(1, N), costs)
    assert whole["float32 ring"] == pytest.approx(6.0 + 0.125)
    # Encode a second, send three million bytes directly, decode four payloads.
    assert whole["A() allgather"] == pytest.approx(1 + 3 * 2 + 0.375 + 4 * 2)
    # 3/4 of a byte, and of two; encode a quarter again, decode both; one more collective.
    sr = 1 + 1 + (0.75 + 1.5) * 2 + 0.375 + 0.25 + 2 + 8
    assert whole["A() scatter_reduce"] == pytest.approx(sr)
    half = seconds(Cluster(4, 1e18, latency=0.0, cores=0.5), Job(1, N), costs)
    assert half == pytest.approx({name: 2 * value for name, value in whole.items()})
    four = Cluster(4, 1e18, per_host=4, latency=0.0, cores=2)
    assert seconds(four, Job(1, N), costs) == pytest.approx(half)


def test_ranks_of_a_host_share_its_link():
    found = seconds(Cluster(8, LINK, per_host=4, latency=0.0), Job(1, N), machine())
    assert found["float32 ring"] == pytest.approx(2 * 7 / 8 * 4 * N / LINK)
    # Of each rank's eight parts four leave the host; averages pass it once.
    sr = 4 * 4 / 8 * 3 / 8 * N / LINK + 7 / 8 * 5 / 8 * N / LINK
    assert found["ALQ(bits=3) scatter_reduce"] == pytest.approx(sr)


@pytest.mark.parametrize(("hosts", "per_host"), [(2, 4), (4, 2)])
def test_hierarchical_sends_slices_between_hosts(hosts, per_host):
    cluster = Cluster(hosts * per_host, LINK, per_host, latency=0.0)
    found = predict(cluster, Job(1, N), machine())[-1]
    assert found.exchange == "hierarchical"
    # A host's ranks send the gradient once, in slices; to one other host, or parts and averages.
    leaves = 3 / 8 * N if hosts == 2 else (hosts - 1) / hosts * (3 + 4) / 8 * N
    assert found.wire_bytes == pytest.approx(leaves / per_host)
    assert found.step_s == pytest.approx(leaves / LINK)
    advice = advise(predict(cluster, Job(1, N), machine()))
    assert told(advice.choice) == "ALQ(bits=3, exchange='hierarchical')"
    assert " MB to other hosts instead of " in advice.why[1]


@pytest.mark.parametrize("hosts", [2, 4])
def test_processor_time_of_hierarchical(hosts):
    costs = machine(
        Codec("A()", 8.0, 1e-6, 2e-6, 0.1, AVERAGES, Averages(8.0, 4e-6, 8e-6)),
        alltoall=Collective(0.25, 3e-6), local=Collective(7.0, 5e-6), add_s=11e-6,
        scheme_step_s=1.0,
    )  # fmt: skip
    found = predict(Cluster(2 * hosts, 1e18, 2, latency=0.0), Job(1, N), costs)[-1]
    # Half of the gradient is a slice: one goes to the other rank of the host, its average back.
    inside = 2 * 4 * 0.5 * 5
    if hosts == 2:  # three collectives, of which one is in the step's time
        between, codec = 0.5 * 3, 0.5 * 1 + 2 * 0.5 * 2
        overhead = 1 + 2 * 0.25
    else:
        between, codec = 0.75 * 2 * 0.5 * 3, 0.5 * (1 + 4 / 4) + 0.5 * (2 + 8)
        overhead = 1 + 3 * 0.25
    assert found.processor_s == pytest.approx(overhead + inside + between + 11 + codec)
    assert found.step_s == pytest.approx(found.processor_s)


def test_hierarchical_needs_several_hosts_of_several_ranks():
    for per_host in (1, 4):
        found = predict(Cluster(4, LINK, per_host), Job(1, N), machine())
        assert "hierarchical" not in {p.exchange for p in found}


def test_gloo_gathers_in_rings():
    """Open MPI, through Horovod, sends few ranks' payloads directly."""
    cluster, job = Cluster(4, LINK, latency=0.0), Job(1, N)
    found, rings = (
        seconds(cluster, job, machine(launcher=launcher, ring_efficiency=0.5))
        for launcher in ("mpi", "gloo")
    )
    assert rings["ALQ(bits=3) allgather"] == pytest.approx(2 * found["ALQ(bits=3) allgather"])
    assert rings["float32 ring"] == found["float32 ring"]


def test_an_exchange_hides_behind_the_backward_pass():
    """In groups: the last one's is left, and the first one's gradients come first."""
    many = 40_000_000  # 160 MB: ten groups of 16 MiB, two of Horovod's, eight where it computes
    job, link = Job(50, many, compute_s=300.0), 4 * many / 80.0
    found = seconds(Cluster(2, link, latency=0.0), job, machine())
    assert found["float32 ring"] == pytest.approx(300 + 80 / 8)
    assert found["ALQ(bits=3) allgather"] == pytest.approx(300 + 80 * 3 / 32 / 10)
    slow = seconds(Cluster(2, link / 10, latency=0.0), job, machine())
    assert slow["float32 ring"] == pytest.approx(100 + 200 / 8 + 800)


CODEC = Codec("qsgd(bits=4,)", 8.0, 1e-6, 2e-6, 0.1, Averages(16.0, 4e-6, 8e-6, 6), AVERAGES)
WRITTEN = (
    "float32", "float16", "QSGD(bits=4, exchange='allgather')",
    "QSGD(bits=4, exchange='scatter_reduce', second_stage_bits=6)",
)  # fmt: skip


@pytest.fixture
def steps_here(monkeypatch):
    """Of ranks on two cores, each method three times as long as its parts; what was asked for, and
    methods with which ranks fail."""
    asked, failing = [], set()

    def measured(methods, tensors, coordinates, count, place, limit):
        asked.append((list(methods), tensors, coordinates, place))
        if failing & set(methods):
            raise ranks.RanksError("mpirun ended with status 1")
        job = Job(tensors, coordinates)
        own = machine(CODEC, scheme_step_s=1.0, stock_step_s=0.5)
        parts = [p.step_s for p in steps.without_wire(own, job, place.count)]
        seconds = dict(zip(WRITTEN, parts, strict=True))
        return [Measured(m, 3.0 * seconds[m], (0.0, 0.0)) for m in methods], {}

    monkeypatch.setattr(steps.exchange, "measure", measured)
    monkeypatch.setattr(steps, "_cores", lambda: 2)
    monkeypatch.setattr(steps, "AT_ONCE", 3)
    return asked, failing


def test_whole_steps_tell_how_much_longer_the_parts_take_together(steps_here):
    """Ranks that crowd this machine as the cluster's its hosts; the wire is not slowed."""
    asked, _ = steps_here
    own = machine(CODEC, scheme_step_s=1.0, stock_step_s=0.5)
    cluster, job = Cluster(8, LINK, latency=0.0, cores=0.5), Job(4, 10 * N)
    # In four ranks on two cores each has half of one.
    assert [p.step_s for p in steps.without_wire(own, job, 4)][:2] == [1.0, 1.0]
    found = steps.factors(own, Conditions(8, 8, 4, 10 * N, cluster.crowd), lambda what: None)
    three = pytest.approx(3.0)
    assert found == {
        "float32": {"ring": three}, "float16": {"ring": three},
        CODEC.label: {"allgather": three, "scatter_reduce": three},
    }  # fmt: skip
    # With the second stage of eight ranks.
    assert [methods for methods, *_ in asked] == [list(WRITTEN[:3]), [WRITTEN[3]]]
    assert all(a[1:3] == (4, 10 * N) and (a[3].count, a[3].tcp) == (4, True) for a in asked)
    slow = dataclasses.replace(own, factors=found)
    for before, after in zip(predict(cluster, job, own), predict(cluster, job, slow), strict=True):
        assert after.processor_s == pytest.approx(3 * before.processor_s)
        assert after.wire_s == before.wire_s


def test_a_method_that_ranks_fail_with_is_told_and_has_no_factor(steps_here, caplog):
    asked, failing = steps_here
    failing.add(WRITTEN[2])
    own = machine(CODEC, scheme_step_s=1.0, stock_step_s=0.5)
    found = steps.factors(own, Conditions(2, 2, 4, N), lambda what: None)
    assert set(found) == {"float32", "float16", CODEC.label}
    assert set(found[CODEC.label]) == {"scatter_reduce"}
    assert [len(methods) for methods, *_ in asked] == [3, 1, 1, 1, 1]
    assert f"{WRITTEN[2]}: no whole step could be measured" in caplog.text
    failing.add("float32")
    with pytest.raises(ranks.RanksError):
        steps.factors(own, Conditions(2, 2, 4, N), lambda what: None)


@pytest.mark.parametrize(
    ("method", "written"),
    [
        ("ALQ", "ALQ(exchange='allgather')"),
        ("alq(exchange='hierarchical', ranks_per_node=4)", "ALQ(exchange='allgather')"),
        ("ALQ(warmup_steps=9, clip=2.5)", "ALQ(clip=2.5, exchange='allgather')"),
    ],
)  # fmt: skip
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
    asked, _ = steps_here
    own = machine(CODEC, scheme_step_s=1.0, stock_step_s=0.5)
    steps.factors(own, Conditions(2, 2, *given), lambda what: None)
    assert asked[0][1:3] == exchanged


def test_hierarchical_is_as_slow_as_scatter_reduce():
    own = machine(factors={"A()": {"allgather": 2.0, "scatter_reduce": 3.0}})
    kinds = ("allgather", "scatter_reduce", "hierarchical")
    assert [own.factor("A()", kind) for kind in kinds] == [2.0, 3.0, 3.0]
    assert own.factor("B()", "allgather") == 1.0


def test_one_rank_exchanges_nothing():
    costs = machine(scheme_step_s=1.0, stock_step_s=1.0)
    found = seconds(Cluster(1, LINK), Job(5, N, compute_s=2.0), costs)
    assert set(found.values()) == {2.0}


def test_advice_is_the_most_exact_of_the_fastest():
    exact = dataclasses.replace(FREE, label="B()", bits=3.05, error=0.1)
    noisy = dataclasses.replace(FREE, label="C()", bits=0.1, error=60.0)
    biased = dataclasses.replace(FREE, label="D()", bits=0.1, unbiased=False)
    predictions = predict(Cluster(2, LINK), Job(1, N), machine(FREE, exact, noisy, biased))
    advice = advise(predictions)
    assert told(advice.choice) == "B()"
    assert (
        "381 ms instead of 4 s (10.49 times as fast)" in advice.why[0]
        and "ALQ(bits=3) would take" in advice.why[2]
    )
    assert "mostly the link" in advice.why[3]
    scatter = next(p for p in predictions if p.exchange == "scatter_reduce")
    assert told(scatter) == "ALQ(bits=3, exchange='scatter_reduce')"
    assert told(dataclasses.replace(scatter, method="T()")) == "T(exchange='scatter_reduce')"
    comma = dataclasses.replace(scatter, method="T(bits=3, )")
    assert told(comma) == "T(bits=3, exchange='scatter_reduce')"


@pytest.mark.parametrize("compute_s", [0.0, 100.0])
def test_advice_not_to_compress(compute_s):
    """The codec takes longer than the link, or the exchange hides behind much computing."""
    slow = dataclasses.replace(FREE, encode_s=1e-6, decode_s=1e-6)
    job, cluster = Job(100, N, compute_s), Cluster(4, 1e9 if compute_s else 1e8, latency=0.0)
    halved = {4: Collective(0.0, 1e-9), 2: Collective(0.0, 4e-8)}
    advice = advise(predict(cluster, job, machine(slow, allreduce=halved)))
    assert advice.choice.method == "float32" and advice.why[0].startswith("do not compress")
    expected = "hides behind" if compute_s else "longer to compress"
    assert expected in advice.why[1]


@pytest.fixture
def constants(tmp_path):
    """Of 4 ranks and a ResNet-18's tensors."""
    path = tmp_path / "constants.json"
    other = dataclasses.replace(FREE, label="ALQ(bits=2)", bits=2.0)
    measure.save(machine(FREE, other), Conditions(4, 4, 62, 11_689_512), path)
    return path


def test_command_with_kept_constants(constants, capsys):
    command = ["plan", "--model", "resnet18", "--ranks", "4", "--bandwidth", "1gbit", "--cores",
               "8", "--constants", str(constants), "--schemes", "ALQ(bits=3)"]  # fmt: skip
    assert main([*command, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert {p["method"] for p in plan["predictions"]} == {"float32", "float16", "ALQ(bits=3)"}
    float32 = next(p for p in plan["predictions"] if p["method"] == "float32")
    assert float32["wire_bytes"] == 1.5 * 4 * 11_689_512
    assert float32["step_s"] == pytest.approx(1.5 * 4 * 11_689_512 / 125e6 + 6 * 50e-6, rel=1e-9)
    assert plan["recommended"]["compression"] == "ALQ(bits=3, exchange='scatter_reduce')"
    assert plan["predictions"] == sorted(plan["predictions"], key=lambda p: p["step_s"])
    assert main(command) == 0
    assert (
        "recommended: ALQ(bits=3, exchange='scatter_reduce'): a step of" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            ["--ranks", "8"],
            "measured for 4 ranks on 4 hosts, 0.125 ranks to a core (--cores), 11689512 "
            "coordinates in 62 tensors, over mpi, not for 8",
        ),
        (["--launcher", "gloo"], "62 tensors, over gloo"),
        (["--cores", "2"], "not for 4 ranks on 4 hosts, 0.5 ranks to a core"),
        (["--ranks-per-host", "2"], "not for 4 ranks on 2 hosts"),
        (["--ranks-per-host", "3"], "must divide --ranks 4"),
        (["--schemes", "ALG()"], "must be one of float32, float16, ALQ"),
        (["--schemes", "ALQ(bits=9)"], "bits=9"),
        (["--schemes", "float32"], "predicted in any case"),
        (["--schemes", "QSGD()"], "has no constants of QSGD()"),
        (["--bandwidth", "10"], "must be a rate such as 10gbit"),
        (["--compute-ms", "-1"], "must be a number above 0"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_command_refuses(constants, changed, message, capsys):
    command = ["plan", "--model", "resnet18", "--ranks", "4", "--bandwidth", "1gbit", "--cores",
               "8", "--constants", str(constants), "--schemes", "ALQ(bits=3)"]  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        main([*command, *changed])
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_constants_that_are_none(tmp_path, capsys):
    (tmp_path / "x.json").write_text('{"ranks": 4}')
    with pytest.raises(SystemExit):
        main(["plan", "--params", "5", "--ranks", "4", "--bandwidth", "1gbit", "--schemes",
              "ALQ()", "--constants", str(tmp_path / "x.json")])  # fmt: skip
    assert "holds no constants" in capsys.readouterr().err


def test_constants_of_another_version(constants, capsys):
    kept = json.loads(constants.read_text())
    del kept["conditions"]["crowd"]
    constants.write_text(json.dumps(kept))
    with pytest.raises(SystemExit):
        main(["plan", "--params", "5", "--ranks", "4", "--bandwidth", "1gbit", "--constants",
              str(constants)])  # fmt: skip
    assert "is of another version" in " ".join(capsys.readouterr().err.split())


def test_command_where_ranks_cannot_start(monkeypatch, capsys):
    def fails(*args):
        raise ranks.RanksError("mpirun ended with status 1", "attempt to run as root")

    monkeypatch.setattr(measure, "run_ranks", fails)
    assert main(["plan", "--params", "5", "--ranks", "4", "--bandwidth", "1gbit"]) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert "OMPI_ALLOW_RUN_AS_ROOT=1" in told and "hvd-adaptive doctor" in told


@pytest.mark.parametrize(("text", "bytes_per_second"), [("10gbit", 1.25e9), ("0.5Mbps", 62_500)])
def test_bandwidth(text, bytes_per_second):
    assert bandwidth(text) == bytes_per_second


@pytest.mark.parametrize("model", ["resnet18", "resnet50", "lstm"])
def test_models_are_as_large_as_the_laboratorys(model):
    """Whose tables hold every tensor's shape."""
    table = Path(__file__).parents[2] / f"benchmarks/laboratory/shapes/{model}.txt"
    rows = [line.split()[1:] for line in table.read_text().splitlines()]
    numbers = sum(math.prod(map(int, sizes)) for sizes in rows)
    assert MODELS[model] == (len(rows), numbers)
    named = shapes(len(rows), numbers)
    assert (len(named), sum(size for _, (size,) in named)) == MODELS[model]


@given(st.integers(1, 300), st.integers(0, 10**8))
def test_made_up_tensors(tensors, more):
    """As many as asked for, none empty, names of their own; weights grow, and hold nearly all."""
    named = shapes(tensors, tensors + more)
    sizes = [size for _, (size,) in named]
    assert (len(sizes), sum(sizes)) == (tensors, tensors + more) and min(sizes) >= 1
    assert len({name for name, _ in named}) == tensors
    weights = sizes[::3]
    assert all(one <= other + 1 for one, other in itertools.pairwise(weights))
    if more > 1000 * tensors:
        assert sum(weights) > 0.998 * sum(sizes)
        assert len(weights) < 2 or 60 < weights[-1] / weights[0] < 68


def test_constants_of_a_codec(monkeypatch):
    """Bits and error are those of payloads; of 8 bits a second stage has 8."""
    monkeypatch.setattr(measure, "COORDINATES", 1 << 17)
    found = measure.codec("QSGD(bits=8, norm='linf')", 4, 4)
    # 255 levels take four codes in 32 bits, a bucket's scale 32 more, a payload's header 768.
    assert found.bits == pytest.approx(8 + 32 / 8192 + 768 / (1 << 17))
    assert found.second.bits == pytest.approx(found.bits) and found.between is found.second
    buckets = measure.gradient(1 << 17).view(-1, 8192).double()
    step = buckets.abs().amax(dim=1, keepdim=True) / 127
    part = (buckets / step).abs() % 1
    # PAYLOADS equal ones are averaged: the error is one payload's.
    expected = (part * (1 - part) * step**2).sum() / buckets.square().sum()
    assert found.error == pytest.approx(float(expected), rel=0.02)
    assert 0 < found.encode_s < 1e-6 and 0 < found.decode_s < 1e-6
