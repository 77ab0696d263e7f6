"""`hvd-adaptive plan`: its arguments, its output, constants of codecs; the cost model by hand, and
the advice."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plan_machines import FREE, LINK, N, job, machine, seconds

from hvd_adaptive.tools import launch
from hvd_adaptive.tools.bench.backward import heavy_tailed
from hvd_adaptive.tools.bench.models import shapes
from hvd_adaptive.tools.cli import main
from hvd_adaptive.tools.methods import parse
from hvd_adaptive.tools.plan import worker
from hvd_adaptive.tools.plan.command import bandwidth
from hvd_adaptive.tools.plan.model import (
    GROUP_BYTES,
    IN_STEP,
    REACHED,
    REACHED_BY_RINGS,
    Cost,
    advise,
    compressed,
    in_script,
    mean_costs,
    predict,
)

COMMAND = ["plan", "--model", "resnet18", "--ranks", "4", "--bandwidth", "1gbit", "--cores", "8"]


@pytest.fixture
def measured(monkeypatch):
    """Nothing is: constants are made up."""
    codec = Cost("ALQ(bits=3)", 2.82, 4e-9, 1e-9, 0.2, second_bits=5.0)
    own = machine(codec, copy_s=1e-9, stock_call_s=1e-4, scheme_call_s=3e-4)
    constants = lambda texts, ranks, launcher: replace(own, launcher=launcher)  # noqa: E731
    monkeypatch.setattr(worker, "constants", constants)


@pytest.fixture
def ranks(monkeypatch, capsys):
    """Ranks that are played: what they were started with, what was printed before, what they
    find."""
    ranks = SimpleNamespace(given=None, before=None, found=None)

    def run_ranks(words, two, seconds):
        ranks.given, ranks.before = json.loads(words[-1]), capsys.readouterr().err
        if isinstance(ranks.found, Exception):
            raise ranks.found
        return [ranks.found]

    monkeypatch.setattr(launch, "run_ranks", run_ranks)
    return ranks


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d[\d.]*", text.replace(",", ""))]


def by_hand(told: str, exchange: str, label: str) -> list[float]:
    """Return step, wire, codec, calls, megabytes of a row, from the formula's printed numbers."""

    def found(pattern: str) -> list[float]:
        (line,) = re.findall(f"^.*?{pattern}(.*)$", told, re.MULTILINE)
        return numbers(line)

    of_a_step, tensors, _ = found("ms of a step: ")
    groups, _ = found("min[(]backward, X[)] / ")
    (compute,), (backward,) = found("forward [+] backward: "), found("2/3 of it: ")
    copy, latency = found("link [+] ")
    bits, second_bits, encode, decode = found(rf"^{re.escape(label)}: ")
    calls = found("calls = tensors")
    payloads, averages, encoded, decoded = found(f"^{exchange}: ")
    messages, link = numbers(told.partition(f"\n{exchange}: ")[2].split("\n")[1])
    megabytes = of_a_step * (payloads * bits + averages * second_bits) / 8e6
    wire = megabytes * (link + copy) + messages * latency / 1e3  # in ms
    codec = of_a_step * (encoded * encode + decoded * decode) / 1e6
    calls = tensors * calls[exchange != "ring"] / 1e3
    total = wire + codec + calls
    step = compute - backward + max(backward, total) + min(backward, total) / groups
    return [step, wire, codec, calls, megabytes]


@pytest.mark.parametrize(
    ("exchange", "label"), [("ring", "float32"), ("scatter_reduce", "ALQ(bits=3)")]
)
@pytest.mark.parametrize(
    ("ranks", "launcher"), [(["4"], "gloo"), (["16", "--ranks-per-host", "4"], "mpi")]
)
def test_a_step_by_the_printed_formula(measured, capsys, exchange, label, ranks, launcher):
    """A person who reads it gets the printed step, from printed numbers alone."""
    words = ["--compute-ms", "300", "--methods", "ALQ(bits=3)", "--launcher", launcher]
    assert main([*COMMAND, "--ranks", *ranks, *words]) == 0
    told = capsys.readouterr().out
    row = rf"│ {re.escape(label)} .*\n│ {exchange} .*$"
    first, _ = re.findall(row, told, re.MULTILINE)[0].split("\n")
    printed = numbers(first.replace(label, ""))[:5]
    assert max(map(len, told.splitlines())) <= 80
    assert by_hand(told, exchange, label) == pytest.approx(printed, rel=5e-3, abs=0.06)
    assert "recommended: ALQ(bits=3, exchange='scatter_reduce')" in told


def test_a_line_comes_before_it_measures(ranks, capsys):
    """So that nobody waits without a word; constants are what ranks have found."""
    costs = [asdict(Cost(name, 3.0, 0.0, 0.0, 0.1)) for name in ("ALQ(bits=3)", "EDEN(bits=2)")]
    found = {"copy_s": 1e-9, "stock_call_s": 2e-5, "scheme_call_s": 6e-5, "codecs": costs}
    ranks.found = dict(found)
    assert main([*COMMAND, "--json"]) == 0
    assert ranks.given == [["ALQ(bits=3)", "EDEN(bits=2)"], 4]
    # A ring of 4 ranks: 6/4 of 11,689,512 numbers, at 0.55 of the link, and 6 messages.
    float32 = 1.5 * 4 * 11_689_512 / (0.55 * 125e6) + 6 * 50e-6
    alone = f"float16 {1e3 * 0.51:.3g} ms by ring, float32 {float32:.3g} s by ring"
    assert f"on the link alone: {alone}" in ranks.before
    own = json.loads(capsys.readouterr().out)["machine"]
    assert own.pop("launcher") in launch.LAUNCHERS and own == found


@pytest.mark.parametrize(("cores", "share"), [(1, 0.5), (2, 1.0), (9, 1.0)])
def test_constants_of_steps(cores, share):
    steps = {"small": [9.0, 2e-3], "large": [0.102, 9.0], "scheme": [6e-3]}
    # 100 tensors take 2 and 6 ms; 4,192,704 more numbers of 4 bytes 0.1 s.
    assert worker.of_steps(steps, cores) == pytest.approx(
        {
            "copy_s": share * 0.1 / (4 * 4_192_704),
            "stock_call_s": share * 2e-5,
            "scheme_call_s": share * 6e-5,
        }
    )
    assert worker.of_steps(steps | {"large": [1e-3]}, cores)["copy_s"] == 0.0


def test_json_has_every_exchange(measured, capsys):
    assert main([*COMMAND, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    found = [(p["method"], p["exchange"]) for p in plan["predictions"]]
    assert sorted(found) == [
        ("ALQ(bits=3)", "allgather"),
        ("ALQ(bits=3)", "scatter_reduce"),
        ("float16", "ring"),
        ("float32", "ring"),
    ]
    assert plan["predictions"] == sorted(plan["predictions"], key=lambda p: p["step_s"])
    assert plan["recommended"]["compression"] == "ALQ(bits=3, exchange='scatter_reduce')"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--ranks", "1"], "argument --ranks: '1': must be an integer of 2 or more"),
        (["--ranks-per-host", "3"], "must divide --ranks 4"),
        (["--methods", "ALG()"], "must be one of float32, float16, ALQ"),
        (["--methods", "ALQ(bits=9)"], "bits=9"),
        (["--methods", "float32"], "must name a scheme"),
        (["--bandwidth", "10"], "must be a rate such as 10gbit"),
        (["--bandwidth", "10GB"], "in bits per second"),
        (["--compute-ms", "-1"], "must be a number above 0"),
        (["--tensors", "11689513"], "must be at most the number of parameters, 11689512"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_command_refuses_at_once(changed, message, capsys, ranks):
    with pytest.raises(SystemExit) as ended:
        main([*COMMAND, *changed])
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert ranks.given is None


@pytest.mark.parametrize(
    ("output", "remedy"),
    [
        ("attempt to run as root", "OMPI_ALLOW_RUN_AS_ROOT=1"),
        ("No module named 'horovod'", "Horovod is not installed: hvd-adaptive install-horovod"),
    ],
)
def test_command_where_ranks_cannot_start(ranks, capsys, output, remedy):
    ranks.found = launch.RanksError("mpirun ended with status 1", output)
    assert main(["plan", "--params", "5", "--ranks", "4", "--bandwidth", "1gbit"]) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert remedy in told and "hvd-adaptive doctor" in told


@pytest.mark.parametrize(
    ("text", "bytes_per_second"),
    [("10gbit", 1.25e9), ("0.5Mbps", 62_500), ("25G", 3.125e9), ("25 Gbit/s", 3.125e9)],
)
def test_bandwidth(text, bytes_per_second):
    assert bandwidth(text) == bytes_per_second


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


def test_constants_of_a_codec():
    """Bits and error are those of payloads; of 8 bits a second stage has 8."""
    (method,) = parse(["QSGD(bits=8, norm='linf')"])
    found = worker.codec(method, 4, 1 << 17, 3)
    # 255 levels take four codes in 32 bits, a bucket's scale 32 more.
    assert (found.bits, found.second_bits) == pytest.approx((8 + 32 / 8192,) * 2, abs=0.01)
    gradient = heavy_tailed((1 << 17,), torch.Generator().manual_seed(0))
    buckets = gradient.view(-1, 8192).double()
    step = buckets.abs().amax(dim=1, keepdim=True) / 127
    part = (buckets / step).abs() % 1
    expected = (part * (1 - part) * step**2).sum() / buckets.square().sum()
    assert found.error == pytest.approx(float(expected), rel=0.02)
    assert 0 < found.encode_s < 1e-6 and 0 < found.decode_s < 1e-6


def test_small_tensors_are_sent_in_float32(measured, capsys):
    """Of 10,000 numbers in 10 tensors three weights of 2,000 to 5,000 are compressed."""
    (small,) = machine(replace(FREE, encode_s=1.0, decode_s=1.0, min_numel=1024)).codecs
    part = compressed(job(4, coordinates=10_000, tensors=10), small)
    (mean,) = mean_costs(job(4, coordinates=10_000, tensors=10), machine(small))
    assert 0.5 < part < 1
    rest = 32 * (1 - part)
    assert (mean.bits, mean.second_bits) == pytest.approx((part * 3 + rest, part * 5 + rest))
    assert (mean.encode_s, mean.decode_s, mean.error) == pytest.approx((part, part, 0.2 * part))
    assert compressed(job(4), small) == 1.0 and mean_costs(job(4), machine(small)) == [small]


@pytest.mark.parametrize("size", [["1000"], ["50000", "--tensors", "1000"]])
def test_no_scheme_is_recommended_for_tensors_that_none_compresses(monkeypatch, capsys, size):
    codec = replace(FREE, min_numel=1024)
    own = machine(codec, stock_call_s=1e-3)  # its calls would be cheaper
    monkeypatch.setattr(worker, "constants", lambda *given: own)
    words = ["plan", "--params", *size, "--ranks", "4", "--bandwidth", "1gbit"]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "recommended: hvd.Compression." in told and "│ ALQ" not in told
    assert "in float32, in tensors below min_numel=1024: 100.0% with ALQ(bits=3)" in told


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


def test_an_exchange_that_is_named_is_the_only_one():
    named = "ALQ(bits=3, exchange=ScatterReduce(second_stage_bits=4))"
    (found,) = (
        p for p in predict(job(4), machine(replace(FREE, label=named))) if p.method == named
    )
    assert found.exchange == "scatter_reduce" and in_script(found) == named
    assert len(seconds(job(4), replace(FREE, label="ALQ(exchange='allgather')"))) == 3
    assert len(seconds(job(4), replace(FREE, label="ALQ(exchange='auto')"))) == 4
