"""`hvd-adaptive plan`: its arguments, its output, constants of codecs."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_machines import machine

from hvd_adaptive.tools import launch
from hvd_adaptive.tools.bench.models import MODELS, shapes
from hvd_adaptive.tools.cli import main
from hvd_adaptive.tools.plan import command, measure
from hvd_adaptive.tools.plan.command import bandwidth
from hvd_adaptive.tools.plan.model import Cost

COMMAND = ["plan", "--model", "resnet18", "--ranks", "4", "--bandwidth", "1gbit", "--cores", "8"]


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """Horovod is, also where the suite runs without it."""
    monkeypatch.setattr(command, "has_horovod", lambda: True)


@pytest.fixture
def measured(monkeypatch):
    """Nothing is: constants are made up."""
    averages = Cost("averages", 5.0, 3e-9, 2e-9, 0.0)
    codec = Cost("ALQ(bits=3)", 2.82, 4e-9, 1e-9, 0.2, second=averages)
    own = machine(codec, copy_s={"allreduce": 1e-9, "allgather": 9e-9}, stock_call_s=1e-4)
    own = replace(own, scheme_call_s=3e-4)
    monkeypatch.setattr(
        measure, "measure", lambda schemes, ranks, launcher, show: replace(own, launcher=launcher)
    )


def numbers(text: str) -> list[float]:
    """Return all numbers of a text."""
    return [float(number) for number in re.findall(r"\d[\d.]*", text.replace(",", ""))]


def by_hand(told: str, exchange: str) -> list[float]:
    """Return step, wire, codec, calls, megabytes of a row, from the formula's printed numbers."""

    def found(pattern: str) -> list[float]:
        (line,) = re.findall(f"^.*?{pattern}(.*)$", told, re.MULTILINE)
        return numbers(line)

    of_a_step, tensors, ranks, _ = found("ms of a step: ")
    groups, _ = found("min[(]backward, X[)] / ")
    (compute,), (backward,) = found("forward [+] backward: "), found("2/3 of it: ")
    (latency,), (rate,) = found("messages [*] "), found("reached [*] ")
    (core,) = found("MB [*] ns a byte / ")
    of_bits, _, of_averages = found("scatter_reduce: bits/8")
    four, _, _, ring = found(" ring: ")
    bits, encode, decode, *second = found("ALQ[(]bits=3[)]: ")
    _, stock_call, scheme_call, _ = found("calls = ")
    if exchange == "ring":
        sent = {"allreduce": of_a_step * four * ring / 1e6}
        codec, call = 0.0, stock_call
    else:
        gathered = second[0] / 8 * of_averages
        sent = {"direct": of_a_step * bits / 8 * of_bits / 1e6}
        sent["allgather"] = of_a_step * gathered / 1e6
        codec, call = encode + decode + second[1] / ranks + second[2], scheme_call
    wire = 0.0  # in ms
    for name, megabytes in sent.items():
        messages, crossing, reached, copy = found(f"^ +{name}: (?=.* messages)")
        wire += messages * latency / 1e3 + megabytes * crossing / (reached * rate / 8)
        wire += megabytes * copy / core
    codec, calls = of_a_step * codec / core / 1e6, tensors * call / core / 1e3
    total = wire + codec + calls
    step = compute - backward + max(backward, total) + min(backward, total) / groups
    return [step, wire, codec, calls, sum(sent.values())]


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
    first, second = re.findall(rf"│ {re.escape(label)} .*\n.*$", told, re.MULTILINE)[0].split("\n")
    assert exchange in second
    printed = numbers(first.replace(label, ""))[:5]
    assert by_hand(told, exchange) == pytest.approx(printed, rel=5e-3, abs=0.06)
    assert "recommended: ALQ(bits=3, exchange='scatter_reduce')" in told


def test_lines_come_before_and_while_it_measures(monkeypatch, capsys):
    """Not only the result, so that nobody waits without a word."""
    monkeypatch.setattr(measure, "COORDINATES", 1 << 14)
    monkeypatch.setattr(measure, "SECONDS", 0.0)
    told = []

    def ranks(*args):
        told.append(capsys.readouterr().err)
        return [{"allreduce": (0.0, 0.1), "allgather": (0.0, 0.1), "stock": 2e-5, "scheme": 6e-5}]

    monkeypatch.setattr(measure, "run_ranks", ranks)
    monkeypatch.setattr(measure.os, "sched_getaffinity", lambda _: {0, 1})
    assert main([*COMMAND, "--methods", "ALQ(bits=3)", "EDEN(bits=2)"]) == 0
    # A ring of 4 ranks: 6/4 of 11,689,512 numbers, at 0.55 of the link, and 6 messages.
    float32 = 1.5 * 4 * 11_689_512 / (0.55 * 125e6) + 6 * 50e-6
    alone = f"float16 {1e3 * 0.51:.3g} ms by ring, float32 {float32:.3g} s by ring"
    assert f"on the link alone: {alone}" in told[0]
    stock, *codecs = capsys.readouterr().err.splitlines()
    # 62 tensors of 20 us, 0.1 s for 16 MiB less 4 KiB; 1.3 times longer in a step.
    processor = 62 * 20e-6 + 1.5 * 4 * 11_689_512 * 0.1 / (2**24 - 2**12)
    assert f"float32 {float32 + 1.3 * processor:.3g} s by ring" in stock
    assert [line.split()[2] for line in codecs] == ["ALQ(bits=3)", "EDEN(bits=2)"]
    assert all(re.search(r"[\d.]+ m?s by scatter_reduce$", line) for line in codecs)


def test_command_without_horovod(monkeypatch, capsys):
    monkeypatch.setattr(command, "has_horovod", lambda: False)
    assert main(COMMAND) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "Horovod, whose collectives are measured, is not installed" in said
    assert "what to do: hvd-adaptive install-horovod" in said


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
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_command_refuses_at_once(changed, message, capsys, monkeypatch):
    monkeypatch.setattr(measure, "measure", lambda *args: pytest.fail("it measures"))
    with pytest.raises(SystemExit) as ended:
        main([*COMMAND, *changed])
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_help_fits_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    told = capsys.readouterr().out
    assert max(map(len, told.splitlines())) <= 80
    options = set(re.findall(r"^  (--[\w-]+)", told, re.MULTILINE))
    assert options >= {"--ranks", "--bandwidth", "--methods"} and "--constants" not in told


def test_command_where_ranks_cannot_start(monkeypatch, capsys):
    def fails(*args):
        raise launch.RanksError("mpirun ended with status 1", "attempt to run as root")

    monkeypatch.setattr(measure, "run_ranks", fails)
    assert main(["plan", "--params", "5", "--ranks", "4", "--bandwidth", "1gbit"]) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert "OMPI_ALLOW_RUN_AS_ROOT=1" in told and "hvd-adaptive doctor" in told


@pytest.mark.parametrize(
    ("text", "bytes_per_second"),
    [("10gbit", 1.25e9), ("0.5Mbps", 62_500), ("25G", 3.125e9), ("25 Gbit/s", 3.125e9)],
)
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
    found = measure.codec("QSGD(bits=8, norm='linf')", 4)
    # 255 levels take four codes in 32 bits, a bucket's scale 32 more, a payload's header 768.
    assert found.bits == pytest.approx(8 + 32 / 8192 + 768 / (1 << 17))
    assert found.second.bits == pytest.approx(found.bits)
    buckets = measure.gradient(1 << 17).view(-1, 8192).double()
    step = buckets.abs().amax(dim=1, keepdim=True) / 127
    part = (buckets / step).abs() % 1
    expected = (part * (1 - part) * step**2).sum() / buckets.square().sum()
    assert found.error == pytest.approx(float(expected), rel=0.02)
    assert 0 < found.encode_s < 1e-6 and 0 < found.decode_s < 1e-6
