"""`hvd-adaptive plan`: its arguments, kept constants, constants of codecs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_machines import FREE, WHOLE, machine

from hvd_adaptive.tools import launch
from hvd_adaptive.tools.bench.models import MODELS, shapes
from hvd_adaptive.tools.cli import main
from hvd_adaptive.tools.plan import kept, measure
from hvd_adaptive.tools.plan.command import bandwidth
from hvd_adaptive.tools.plan.quantities import Conditions


@pytest.fixture
def constants(tmp_path, monkeypatch):
    """Of 4 ranks and a ResNet-18's tensors; links reach all of their rates."""
    monkeypatch.setitem(kept.LABORATORY, "mpi", WHOLE)
    path = tmp_path / "constants.json"
    other = dataclasses.replace(FREE, label="ALQ(bits=2)", bits=2.0)
    kept.save(machine(FREE, other), Conditions(4, 4, 62, 11_689_512), path)
    return path


def test_command_with_kept_constants(constants, capsys):
    command = [
        "plan",
        "--model",
        "resnet18",
        "--ranks",
        "4",
        "--bandwidth",
        "1gbit",
        "--cores",
        "8",
        "--constants",
        str(constants),
        "--schemes",
        "ALQ(bits=3)",
    ]
    assert main([*command, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert {p["method"] for p in plan["predictions"]} == {"float32", "float16", "ALQ(bits=3)"}
    float32 = next(p for p in plan["predictions"] if p["method"] == "float32")
    assert float32["wire_bytes"] == 1.5 * 4 * 11_689_512
    assert float32["step_s"] == pytest.approx(1.5 * 4 * 11_689_512 / 125e6 + 6 * 50e-6, rel=1e-9)
    assert plan["recommended"]["compression"] == "ALQ(bits=3, exchange='scatter_reduce')"
    assert plan["predictions"] == sorted(plan["predictions"], key=lambda p: p["step_s"])
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "recommended: ALQ(bits=3, exchange='scatter_reduce'): a step of" in printed
    assert "in float16 (" in printed and "/ float16" in printed
    assert ", for the exchange alone" in printed and "--compute-ms was not given" in printed
    # As `bench exchange` names its arguments, stock methods included.
    alike = ["float32", "float16", *command[command.index("--schemes") + 1 :]]
    again = [*command[: command.index("--schemes")], "--methods", *alike]
    assert main([*again, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["predictions"] == plan["predictions"]


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
        (["--bandwidth", "10GB"], "in bits per second"),
        (["--compute-ms", "-1"], "must be a number above 0"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_command_refuses(constants, changed, message, capsys):
    command = [
        "plan",
        "--model",
        "resnet18",
        "--ranks",
        "4",
        "--bandwidth",
        "1gbit",
        "--cores",
        "8",
        "--constants",
        str(constants),
        "--schemes",
        "ALQ(bits=3)",
    ]
    with pytest.raises(SystemExit) as ended:
        main([*command, *changed])
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_constants_that_are_none(tmp_path, capsys):
    (tmp_path / "x.json").write_text('{"ranks": 4}')
    with pytest.raises(SystemExit):
        main(
            [
                "plan",
                "--params",
                "5",
                "--ranks",
                "4",
                "--bandwidth",
                "1gbit",
                "--schemes",
                "ALQ()",
                "--constants",
                str(tmp_path / "x.json"),
            ]
        )
    assert "holds no constants" in capsys.readouterr().err


def test_constants_of_another_version(constants, capsys):
    told = json.loads(constants.read_text())
    assert "reached" not in told["machine"]
    constants.write_text(json.dumps(told | {"version": 1}))
    with pytest.raises(SystemExit):
        main(
            [
                "plan",
                "--params",
                "5",
                "--ranks",
                "4",
                "--bandwidth",
                "1gbit",
                "--constants",
                str(constants),
            ]
        )
    assert "is of another version" in " ".join(capsys.readouterr().err.split())


def test_command_where_ranks_cannot_start(monkeypatch, capsys):
    def fails(*args):
        raise launch.RanksError("mpirun ended with status 1", "attempt to run as root")

    monkeypatch.setattr(measure, "run_ranks", fails)
    assert main(["plan", "--params", "5", "--ranks", "4", "--bandwidth", "1gbit"]) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert "measuring this machine, which takes about 3 min" in told
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
