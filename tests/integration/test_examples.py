"""The examples, end to end: what they print, write and return, and what they refuse."""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path

import compression
import forked
import mnist
import psutil
import pytest
from script_runs import MPIRUN, ROOT, png_size, run

from hvd_adaptive.monitor.log import read_logs
from hvd_adaptive.tools.cli import main

pytestmark = [pytest.mark.integration, pytest.mark.parallel, pytest.mark.timeout(330)]

MNIST = ROOT / "examples" / "mnist.py"
MNIST_ON_TWO_RANKS = [*MPIRUN, sys.executable, str(MNIST), "--no-cuda"]
COORDINATES = 431_080
# What an untrained net gets right is about a tenth.
TRAINED = 0.85


def read_run(path: Path) -> dict:
    """The only run in a file that --json wrote."""
    (only,) = json.loads(path.read_text())["runs"]
    return only


def test_training_with_alq(tmp_path: Path) -> None:
    """Two ranks learn, stay equal, send what 3 bits promise, and write it down."""
    flags = "--compression alq --bits 3 --batch-size 32 --lr 0.01 --momentum 0.9 --epochs 1"
    flags += " --update-steps 0 20 40 --json results.json --monitor log"
    told = run([*MNIST_ON_TWO_RANKS, *flags.split()], tmp_path, 180)
    assert "parameters equal on 2 ranks" in told
    assert "Train Step: 60/62" in told and "\r" not in told  # lines: the output is no terminal

    settings = json.loads((tmp_path / "results.json").read_text())["settings"]
    assert (settings["ranks"], settings["compression"], settings["bits"]) == (2, "alq", 3)
    result = read_run(tmp_path / "results.json")
    assert result["accuracy"] >= TRAINED
    assert result["replicas_equal"] is True
    assert result["coordinates"] == COORDINATES
    assert result["uncompressed_bytes"] / result["payload_bytes"] >= 9.5
    assert result["wire_bytes"] == result["payload_bytes"]  # allgather over 2 ranks
    assert result["bits_per_coordinate"] == 8 * result["payload_bytes"] / COORDINATES
    assert 0 < result["relative_error"] < 1
    assert result["steps"] == 62
    assert result["curve"][-1]["wire_bytes"] == 62 * result["wire_bytes"]
    assert [table["version"] for table in result["tables"]] == [0, 1, 2, 3]
    assert [table["step"] for table in result["tables"]] == [None, 0, 20, 40]
    assert all(len(table["levels"]) == 7 for table in result["tables"])

    (log,) = read_logs(tmp_path / "log")
    assert [record["step"] for record in log.steps] == list(range(62))
    assert {record["payload_bytes"] for record in log.steps} == {result["payload_bytes"]}
    assert [table["levels"] for table in log.tables] == [t["levels"] for t in result["tables"][1:]]
    assert main(["report", str(tmp_path / "log")]) == 0
    assert "fc1.weight" in (tmp_path / "log" / "report.html").read_text()


@pytest.mark.thorough
def test_demo(tmp_path: Path) -> None:
    """--demo trains three times, prints both tables, draws its picture and is content."""
    flags = "--demo --ranks 2 --epochs 1 --lr 0.01 --test-interval 31 --output-dir out"
    command = [sys.executable, str(MNIST), *flags.split()]
    told = run(command, tmp_path, 300)
    shown = ("Horovod float32", "Horovod fp16", "ALQ, 3 bits", "1,724,320", "862,160")
    for text in (*shown, "before", "after", "±0.125"):
        assert text in told, told
    assert "\x1b" not in told  # neither colours nor a bar where there is no terminal
    results = {
        name: read_run(tmp_path / f"out/mnist_{name}.json") for name in ("none", "fp16", "alq")
    }
    assert all(result["accuracy"] >= TRAINED for result in results.values())
    assert results["none"]["payload_bytes"] == 4 * COORDINATES
    assert results["fp16"]["payload_bytes"] == 2 * COORDINATES
    assert results["fp16"]["wire_bytes"] == 2 * COORDINATES  # 2 (N - 1) / N of it
    assert results["none"]["tables"] == []
    picture = tmp_path / "out/mnist_demo.png"
    assert min(png_size(picture)) >= 400
    assert picture.stat().st_size > 20_000


def test_the_demos_bytes_are_those_of_the_page(tmp_path: Path) -> None:
    """What 4 ranks send in a step does not depend on the step: two steps are enough. That README
    has the same figures is checked in tests/repository/test_docs_numbers.py."""
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8").split("## `make demo`")[1]
    page = page.split("\n## ")[0]
    rows = [[cell.strip(" `") for cell in line.split("|")][1:-1] for line in page.splitlines()]
    shown = {row[0]: row[2:] for row in rows if len(row) == 6}
    ring = 2 * (4 - 1) / 4
    sent = {"Horovod float32": (4 * COORDINATES, ring * 4 * COORDINATES)}
    sent["Horovod fp16"] = (2 * COORDINATES, ring * 2 * COORDINATES)

    flags = ["--no-cuda", "--compression", "alq", "--bits", "3", "--batch-size", "500"]
    flags += ["--epochs", "1", "--json", str(tmp_path / "alq.json")]
    forked.run(4, MNIST, flags, {}, tmp_path, 180)
    result = read_run(tmp_path / "alq.json")
    sent["ALQ(bits=3)"] = (result["payload_bytes"], result["wire_bytes"])
    for name, numbers in sent.items():
        expected = []
        for number, float32 in zip(numbers, sent["Horovod float32"], strict=True):
            ratio = "1" if number == float32 else f"{float32 / number:.2f}"
            expected += [f"{number:,.0f}", ratio]
        assert shown[name] == expected, name


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--compression", "alg"], "invalid choice: 'alg'"),
        (["--compression", "fp16", "--bits", "3"], "'fp16' takes none of bits"),
        (["--demo", "--bits", "9"], "bits=9"),
    ],
    ids=["name", "option", "value"],
)
def test_refuses_bad_flags(flags, message, monkeypatch, capsys) -> None:
    """What cannot be run ends at once, with a message and without a traceback."""
    monkeypatch.setattr(sys, "argv", ["mnist.py", *flags])
    monkeypatch.setattr("signal.signal", lambda *handler: None)
    with pytest.raises(SystemExit) as ended:
        sys.exit(mnist.main())
    assert ended.value.code and message in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("example", "flag", "value"),
    [
        ("amp_clipping", "bits", 99),
        ("char_lstm", "bits", 99),
        ("custom_scheme", "bucket_size", 0),
        ("ddp_hook", "bits", 99),
        ("elastic", "bits", 99),
        ("fsdp2", "bits", 99),
        ("resume", "error_feedback", 2.0),
        ("synthetic_benchmark", "bits", 99),
    ],
)
def test_bad_values_are_usage_errors(example, flag, value, monkeypatch, capsys) -> None:
    """Before ranks start, with the scheme's message."""
    for start in ("horovod.torch.init", "torch.distributed.init_process_group"):
        monkeypatch.setattr(start, lambda *args: pytest.fail("ranks have started"))
    words = [f"{example}.py", f"--{flag.replace('_', '-')}", str(value)]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(example).main()
    assert ended.value.code == 2
    assert f"error: {flag}={value}" in capsys.readouterr().err


def test_demo_defaults_are_those_that_the_scheme_has() -> None:
    """EDEN has no level table to fit; 3 bits are the demo's default of schemes with bits."""
    found = {}
    for name in ("alq", "eden", "bingrad", "fp16"):
        own = compression.own_defaults({"bits": 3, "update_steps": [0], "epochs": 6}, name)
        found[name] = sorted(own)
    assert found["alq"] == ["bits", "epochs", "update_steps"]
    assert found["eden"] == ["bits", "epochs"]
    assert found["bingrad"] == found["fp16"] == ["epochs"]


def test_demo_kills_ranks_that_hang(tmp_path: Path) -> None:
    """Ranks that take too long are killed, the message says so, and none is left."""
    command = [sys.executable, str(MNIST), *["--demo", "--ranks", "2", "--timeout", "0.5"]]
    command += ["--output-dir", str(tmp_path)]
    told = run(command, tmp_path, 60, status=1)
    assert "Horovod float32: did not end within 0.5 s, so its ranks were killed" in told
    end = time.monotonic() + 30
    while left := [command for command in commands() if any(str(tmp_path) in w for w in command)]:
        assert time.monotonic() < end, left
        time.sleep(0.2)


def commands() -> list[list[str]]:
    return [p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"])]
