"""The cost model by hand, and the advice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_machines import FREE, LINK, N, job, machine, seconds

from hvd_adaptive.tools.plan.model import (
    GROUP_BYTES,
    IN_STEP,
    REACHED,
    REACHED_BY_RINGS,
    Cost,
    advise,
    in_script,
    predict,
)

FAST = 1e18  # bytes per second


@pytest.mark.parametrize(("count", "ring"), [(2, REACHED), (4, REACHED_BY_RINGS)])
def test_bytes_over_the_link(count, ring):
    """2 (n-1)/n of 4 or 2 bytes; n-1 payloads of 3 bits; (n-1)/n of 3 and of 5 bits."""
    part = (count - 1) / count
    assert seconds(job(count)) == pytest.approx(
        {
            "float32 ring": 2 * part * 4 * N / LINK / ring,
            "float16 ring": 2 * part * 2 * N / LINK / ring,
            "ALQ(bits=3) allgather": (count - 1) * 3 / 8 * N / LINK / REACHED,
            "ALQ(bits=3) scatter_reduce": part * (3 + 5) / 8 * N / LINK / REACHED,
        }
    )
    sent = {p.exchange: p.sent for p in predict(job(count), machine())}
    assert sent["allgather"] == pytest.approx((count - 1) * 3 / 8 * N)


@pytest.mark.parametrize(("launcher", "reached"), [("gloo", REACHED), ("mpi", REACHED_BY_RINGS)])
def test_gathers_that_are_rings(launcher, reached):
    """Open MPI, through Horovod, sends up to six ranks' payloads directly."""
    found = seconds(job(8), launcher=launcher)
    assert found["ALQ(bits=3) allgather"] == pytest.approx(7 * 3 / 8 * N / LINK / reached)
    mean = (1 / REACHED + 1 / reached) / 2  # direct messages, then a gather
    assert found["ALQ(bits=3) scatter_reduce"] == pytest.approx(7 / 8 * N / LINK * mean)


def test_messages_have_latency():
    assert seconds(job(4, FAST, latency=1.0)) == pytest.approx(
        {
            "float32 ring": 6,
            "float16 ring": 6,
            "ALQ(bits=3) allgather": 3,
            "ALQ(bits=3) scatter_reduce": 6,
        }
    )


def test_the_processors_terms_and_its_share():
    codec = Cost("A()", 8.0, 1e-6, 2e-6, 0.1, second_bits=16.0)
    costs = {"copy_s": 1e-6, "stock_call_s": 0.1, "scheme_call_s": 0.2}
    own = job(4, FAST, tensors=5)
    whole = seconds(own, codec, **costs)
    # Copy six megabytes, five calls.
    assert whole["float32 ring"] == pytest.approx(IN_STEP * (6 + 0.5))
    # Copy three million bytes, encode a second, decode four payloads.
    assert whole["A() allgather"] == pytest.approx(IN_STEP * (3 + 1 + 4 * 2 + 1))
    # Copy 3/4 of one byte and of two; encode, decode, a quarter of the averages and all of them.
    codecs = 1 + 2 + 0.25 + 2
    assert whole["A() scatter_reduce"] == pytest.approx(IN_STEP * (0.75 * 3 + codecs + 1))
    half = seconds(replace(own, cores=0.5), codec, **costs)
    assert half == pytest.approx({name: 2 * value for name, value in whole.items()})
    four = replace(own, per_host=4, latency=9.0, cores=2)  # a host has neither link nor latency
    assert seconds(four, codec, **costs) == pytest.approx(half)


def test_ranks_of_a_host_share_its_link():
    found = seconds(job(4, per_host=2))
    assert found["float32 ring"] == pytest.approx(1.5 * 4 * N / LINK / REACHED_BY_RINGS)
    # Each of two ranks sends its payload to two ranks of the other host.
    assert found["ALQ(bits=3) allgather"] == pytest.approx(2 * 2 * 3 / 8 * N / LINK / REACHED)


def test_an_exchange_hides_behind_the_backward_pass():
    """In groups: the last one's is left."""
    many = 10 * GROUP_BYTES // 4
    link = 4 * many / 80.0 / REACHED
    own = job(2, link, coordinates=many, compute_s=300.0)
    assert seconds(own)["float32 ring"] == pytest.approx(300 + 80 / 10)
    slow = seconds(replace(own, bandwidth=link / 10))
    assert slow["float32 ring"] == pytest.approx(100 + 800 + 200 / 10)


def test_advice_is_the_most_exact_of_the_fastest():
    exact = replace(FREE, label="B()", bits=3.05, error=0.1)
    noisy = replace(FREE, label="C()", bits=0.1, error=60.0)
    biased = replace(FREE, label="D()", bits=0.1, unbiased=False)
    choice, why = advise(predict(job(2), machine(FREE, exact, noisy, biased)))
    assert in_script(choice) == "B(exchange='allgather')"
    assert why == "a step of 449 ms instead of 2.35 s in float16; relative squared error 0.1"
    stock, why = advise(predict(job(2, FAST, compute_s=100.0), machine()))
    assert in_script(stock) == "hvd.Compression.none" and "no method saves 5%" in why
    half, why = advise(predict(job(2), machine(noisy)))
    assert in_script(half) == "hvd.Compression.fp16" and "instead of 4.71 s in float32" in why
