"""The cost model by hand, and the advice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_machines import AVERAGES, FREE, LINK, N, machine, seconds

from hvd_adaptive.tools.plan.model import (
    GROUP_BYTES,
    IN_STEP,
    REACHED,
    REACHED_BY_RINGS,
    Cluster,
    Cost,
    Job,
    advise,
    in_script,
    predict,
)

FAST = 1e18  # bytes per second


@pytest.mark.parametrize(("count", "ring"), [(2, REACHED), (4, REACHED_BY_RINGS)])
def test_bytes_over_the_link(count, ring):
    found = seconds(Cluster(count, LINK, latency=0.0), Job(1, N), machine())
    assert found == pytest.approx(
        {
            "float32 ring": 2 * (count - 1) / count * 4 * N / LINK / ring,
            "float16 ring": 2 * (count - 1) / count * 2 * N / LINK / ring,
            "ALQ(bits=3) allgather": (count - 1) * 3 / 8 * N / LINK / REACHED,
            "ALQ(bits=3) scatter_reduce": (count - 1) / count * (3 + 5) / 8 * N / LINK / REACHED,
        }
    )
    sent = {p.exchange: p.sent for p in predict(Cluster(count, LINK), Job(1, N), machine())}
    assert sent["allgather"] == pytest.approx((count - 1) * 3 / 8 * N)


@pytest.mark.parametrize(("launcher", "ranks"), [("gloo", 4), ("mpi", 8)])
def test_gathers_that_are_rings(launcher, ranks):
    """Open MPI, through Horovod, sends up to six ranks' payloads directly."""
    found = seconds(Cluster(ranks, LINK, latency=0.0), Job(1, N), machine(launcher=launcher))
    reached = REACHED if launcher == "gloo" else REACHED_BY_RINGS
    assert found["ALQ(bits=3) allgather"] == pytest.approx((ranks - 1) * 3 / 8 * N / LINK / reached)
    copies = machine(launcher=launcher, copy_s={"allreduce": 0.0, "allgather": 1e-6})
    copied = seconds(Cluster(ranks, FAST, latency=0.0), Job(1, N), copies)
    assert copied["ALQ(bits=3) allgather"] == pytest.approx((ranks - 1) * 3 / 8 * IN_STEP)
    assert copied["float32 ring"] == pytest.approx(0, abs=1e-9)


def test_messages_have_latency():
    found = seconds(Cluster(4, FAST, latency=1.0), Job(1, N), machine())
    assert found == pytest.approx(
        {
            "float32 ring": 6,
            "float16 ring": 6,
            "ALQ(bits=3) allgather": 3,
            "ALQ(bits=3) scatter_reduce": 6,
        }
    )


def test_the_processors_terms_and_its_share():
    second = replace(AVERAGES, bits=16.0, encode_s=4e-6, decode_s=8e-6)
    costs = machine(
        Cost("A()", 8.0, 1e-6, 2e-6, 0.1, second=second),
        copy_s={"allreduce": 1e-6, "allgather": 7.0},
        stock_call_s=0.1,
        scheme_call_s=0.2,
    )
    whole = seconds(Cluster(4, FAST, latency=0.0), Job(5, N), costs)
    # Six megabytes, five calls.
    assert whole["float32 ring"] == pytest.approx(IN_STEP * (6 + 0.5))
    # Send three million bytes, encode a second, decode four payloads.
    assert whole["A() allgather"] == pytest.approx(IN_STEP * (3 + 1 + 4 * 2 + 1))
    # 3/4 of a byte, and of two; encode a quarter again, decode both.
    assert whole["A() scatter_reduce"] == pytest.approx(
        IN_STEP * (0.75 + 1.5 + 1 + 4 / 4 + 2 + 8 + 1)
    )
    half = seconds(Cluster(4, FAST, latency=0.0, cores=0.5), Job(5, N), costs)
    assert half == pytest.approx({name: 2 * value for name, value in whole.items()})
    four = Cluster(4, FAST, per_host=4, latency=9.0, cores=2)
    assert seconds(four, Job(5, N), costs) == pytest.approx(half)


def test_ranks_of_a_host_share_its_link():
    found = seconds(Cluster(4, LINK, per_host=2, latency=0.0), Job(1, N), machine())
    assert found["float32 ring"] == pytest.approx(1.5 * 4 * N / LINK / REACHED_BY_RINGS)
    # Each of two ranks sends its payload to two ranks of the other host.
    assert found["ALQ(bits=3) allgather"] == pytest.approx(2 * 2 * 3 / 8 * N / LINK / REACHED)


def test_averages_that_are_not_compressed():
    found = seconds(Cluster(2, LINK, latency=0.0), Job(1, N), machine(replace(FREE, second=None)))
    assert found["ALQ(bits=3) scatter_reduce"] == pytest.approx(35 / 16 * N / LINK / REACHED)


def test_an_exchange_hides_behind_the_backward_pass():
    """In groups: the last one's is left."""
    many = 10 * GROUP_BYTES // 4
    job, link = Job(50, many, compute_s=300.0), 4 * many / 80.0 / REACHED
    found = seconds(Cluster(2, link, latency=0.0), job, machine())
    assert found["float32 ring"] == pytest.approx(300 + 80 / 10)
    slow = seconds(Cluster(2, link / 10, latency=0.0), job, machine())
    assert slow["float32 ring"] == pytest.approx(100 + 800 + 200 / 10)


def test_advice_is_the_most_exact_of_the_fastest():
    exact = replace(FREE, label="B()", bits=3.05, error=0.1)
    noisy = replace(FREE, label="C()", bits=0.1, error=60.0)
    biased = replace(FREE, label="D()", bits=0.1, unbiased=False)
    found = predict(Cluster(2, LINK, latency=0.0), Job(1, N), machine(FREE, exact, noisy, biased))
    choice, why = advise(found)
    assert in_script(choice) == "B(exchange='allgather')"
    assert why == "a step of 449 ms instead of 2.35 s in float16; relative squared error 0.1"
    stock, why = advise(predict(Cluster(2, FAST, latency=0.0), Job(1, N, 100.0), machine(FREE)))
    assert in_script(stock) == "hvd.Compression.none" and "no method saves 5%" in why
    half, why = advise(predict(Cluster(2, LINK, latency=0.0), Job(1, N), machine(noisy)))
    assert in_script(half) == "hvd.Compression.fp16" and "instead of 4.71 s in float32" in why
