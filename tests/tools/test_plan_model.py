"""The cost model by hand, and the advice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_machines import AVERAGES, FREE, LINK, NOTHING, WHOLE, N, machine, seconds

from hvd_adaptive.tools.plan.advice import advise, in_script
from hvd_adaptive.tools.plan.model import GROUP_BYTES, predict
from hvd_adaptive.tools.plan.quantities import FAST, SLOW, Averages, Cluster, Codec, Collective, Job


@pytest.mark.parametrize("count", [2, 4, 16])
def test_bytes_over_the_link(count):
    found = seconds(Cluster(count, LINK, latency=0.0), Job(1, N), machine())
    assert found == pytest.approx(
        {
            "float32 ring": 2 * (count - 1) / count * 4 * N / LINK,
            "float16 ring": 2 * (count - 1) / count * 2 * N / LINK,
            "ALQ(bits=3) allgather": (count - 1) * 3 / 8 * N / LINK,
            "ALQ(bits=3) scatter_reduce": (count - 1) / count * (3 + 5) / 8 * N / LINK,
        }
    )


@pytest.mark.parametrize(
    ("rate", "of_the_way"), [(SLOW / 9, 0), (SLOW, 0), ((SLOW * FAST) ** 0.5, 0.5), (1e12, 1)]
)
def test_messages_reach_a_part_of_the_rate(rate, of_the_way):
    """Rings, those of two ranks and direct messages each their own."""
    reached = replace(WHOLE, ring=(0.25, 0.75), pair=(0.5, 1.0), direct=(0.1, 0.3))
    ring, pair, direct = (
        slow + (fast - slow) * of_the_way
        for slow, fast in (reached.ring, reached.pair, reached.direct)
    )
    four, two = (
        seconds(Cluster(n, rate, latency=0.0), Job(1, N), machine(reached=reached)) for n in (4, 2)
    )
    assert four["float32 ring"] == pytest.approx(6 * N / rate / ring)
    assert two["float32 ring"] == pytest.approx(4 * N / rate / pair)
    assert four["ALQ(bits=3) allgather"] == pytest.approx(3 * 3 / 8 * N / rate / direct)
    part = 3 / 4 * (3 + 5) / 8 * N / rate
    assert four["ALQ(bits=3) scatter_reduce"] == pytest.approx(part / direct)


@pytest.mark.parametrize(("rate", "step_s"), [(1e6, 6 + 3 - 0.25 * 3), (4e6, 1.5 + 3 - 0.25 * 1.5)])
def test_a_part_of_what_the_processor_does_hides_behind_the_wire(rate, step_s):
    """Or of the wire behind it: of a ring of six megabytes that takes three seconds."""
    own = machine(
        allreduce={4: Collective(0.0, 0.4e-6), 2: NOTHING},
        stock_step_s=0.6,
        reached=replace(WHOLE, hidden=0.25),
    )
    found = seconds(Cluster(4, rate, latency=0.0), Job(1, N), own)
    assert found["float32 ring"] == pytest.approx(step_s)


def test_a_shared_processor_waits_for_the_last_group():
    """Ten groups; encoding takes 40 s, decoding as long, of which the wire, 30 s, hides behind all
    but one group's."""
    many = 10 * GROUP_BYTES // 4
    codec = Codec("A()", 8.0, 20 / many, 10 / many, 0.1, AVERAGES, AVERAGES)
    cluster = Cluster(2, many / 30, latency=0.0, cores=0.5)
    found = seconds(cluster, Job(1, many), machine(codec))
    assert found["A() allgather"] == pytest.approx(40 + 40 + 30 / 10)


def test_an_allgather_of_3_bits_loses_to_a_ring_beyond_21_ranks():
    for count, wins in ((21, True), (22, False)):
        found = seconds(Cluster(count, LINK, latency=0.0), Job(1, N), machine())
        assert (found["ALQ(bits=3) allgather"] < found["float32 ring"]) == wins


def test_messages_have_latency():
    found = seconds(Cluster(4, 1e18, latency=1.0), Job(1, N), machine())
    assert found == pytest.approx(
        {
            "float32 ring": 6,
            "float16 ring": 6,
            "ALQ(bits=3) allgather": 3,
            "ALQ(bits=3) scatter_reduce": 6,
        }
    )


def test_processor_time_and_what_of_it_is_shared():
    costs = machine(
        Codec("A()", 8.0, 1e-6, 2e-6, 0.1, AVERAGES, AVERAGES),
        allreduce={4: Collective(0.0, 1e-6), 2: NOTHING},
        allgather=Collective(0.5, 1e-6),
        alltoall=Collective(0.25, 2e-6),
        stock_step_s=0.125,
        scheme_step_s=0.375,
    )
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
    # Open MPI's ranks of a host add up halves first; Gloo's ring leaves it once.
    assert found["float32 ring"] == pytest.approx(2 * 1 / 2 * 4 * N / LINK)
    gloo = seconds(Cluster(8, LINK, per_host=4, latency=0.0), Job(1, N), machine(launcher="gloo"))
    assert gloo["float32 ring"] == pytest.approx(2 * 7 / 8 * 4 * N / LINK)
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
    assert in_script(advice.choice) == "ALQ(bits=3, exchange='hierarchical')"
    assert " MB to other hosts instead of " in advice.why[2]


@pytest.mark.parametrize("hosts", [2, 4])
def test_processor_time_of_hierarchical(hosts):
    costs = machine(
        Codec("A()", 8.0, 1e-6, 2e-6, 0.1, AVERAGES, Averages(8.0, 4e-6, 8e-6)),
        alltoall=Collective(0.25, 3e-6),
        local=Collective(7.0, 5e-6),
        add_s=11e-6,
        scheme_step_s=1.0,
    )
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
    slow = replace(WHOLE, ring=(0.5, 0.5))
    found, rings = (
        seconds(cluster, job, machine(launcher=launcher, reached=slow))
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


times = st.floats(0.0, 10.0)


@given(st.integers(1, 6), times, times, times)
def test_encoding_exchange_and_decoding_as_two_threads_would_do_them(groups, encode, link, decode):
    """One encodes all groups and decodes what has come, in order, the other exchanges."""
    numbers = groups * GROUP_BYTES // 4
    own = machine(
        Codec("A()", 8.0, encode / numbers, decode / 2 / numbers, 0.1, AVERAGES, AVERAGES)
    )
    cluster = Cluster(2, numbers / max(link, 1e-9), latency=0.0)
    exchanged, free = 0.0, encode
    arrived = []
    for group in range(groups):
        exchanged = max(exchanged, (group + 1) * encode / groups) + link / groups
        arrived.append(exchanged)
    for time in arrived:
        free = max(free, time) + decode / groups
    found = seconds(cluster, Job(1, numbers), own)
    assert found["A() allgather"] == pytest.approx(free, abs=1e-8)


def test_one_host_sends_nothing_over_its_link():
    costs = machine(stock_step_s=1.0, scheme_step_s=2.0)
    found = seconds(Cluster(4, LINK, per_host=4, latency=1.0), Job(1, N), costs)
    assert set(found.values()) == {1.0, 2.0}


def test_one_rank_exchanges_nothing():
    costs = machine(scheme_step_s=1.0, stock_step_s=1.0)
    found = seconds(Cluster(1, LINK), Job(5, N, compute_s=2.0), costs)
    assert set(found.values()) == {2.0}


def test_advice_is_the_most_exact_of_the_fastest():
    exact = replace(FREE, label="B()", bits=3.05, error=0.1)
    noisy = replace(FREE, label="C()", bits=0.1, error=60.0)
    biased = replace(FREE, label="D()", bits=0.1, unbiased=False)
    predictions = predict(Cluster(2, LINK), Job(1, N), machine(FREE, exact, noisy, biased))
    advice = advise(predictions)
    assert in_script(advice.choice) == "B()"
    assert "381 ms instead of 2 s in float16 (5.25 times as fast)" in advice.why[0]
    assert "float32 takes 4 s (10.49 times as long)" in advice.why[1]
    assert "ALQ(bits=3) would take" in advice.why[3]
    assert "mostly the link" in advice.why[4]
    assert advice.uncompressed.method == "float16" and "--compute-ms" not in str(advice.why)
    alone = advise(predictions, is_computing_known=False)
    assert alone.choice is advice.choice and alone.why[0] == advice.why[0] + (
        ", for the exchange alone"
    )
    assert "--compute-ms was not given" in alone.why[-1]
    scatter = next(p for p in predictions if p.exchange == "scatter_reduce")
    assert in_script(scatter) == "ALQ(bits=3, exchange='scatter_reduce')"
    assert in_script(replace(scatter, method="T()")) == "T(exchange='scatter_reduce')"
    comma = replace(scatter, method="T(bits=3, )")
    assert in_script(comma) == "T(bits=3, exchange='scatter_reduce')"


def test_advice_names_the_longest_part():
    """Three seconds of the processor in the exchange, of which the wire, 2.25 s, hides half."""
    costs = machine(alltoall=Collective(0.0, 8e-6 / 3), reached=replace(WHOLE, hidden=0.5))
    predictions = predict(Cluster(4, LINK / 2, latency=0.0), Job(1, N), costs)
    choice = next(p for p in predictions if p.exchange == "allgather")
    assert choice.wire_s == pytest.approx(2.25) and choice.processor_s == pytest.approx(3.0)
    (reason,) = [why for why in advise([choice, predictions[0]]).why if "mostly" in why]
    assert reason == "what is left is mostly the processor's part of the exchange (3 s)"


@pytest.mark.parametrize("compute_s", [0.0, 100.0])
def test_advice_not_to_compress(compute_s):
    """The codec takes longer than the link, or the exchange hides behind much computing."""
    slow = replace(FREE, encode_s=1e-6, decode_s=1e-6)
    job, cluster = Job(100, N, compute_s), Cluster(4, 1e9 if compute_s else 1e8, latency=0.0)
    halved = {4: Collective(0.0, 1e-9), 2: Collective(0.0, 4e-8)}
    advice = advise(predict(cluster, job, machine(slow, allreduce=halved)))
    assert advice.choice.method == "float32" and advice.why[0].startswith("do not compress")
    expected = "hides behind" if compute_s else "longer to compress"
    assert expected in advice.why[1]
