"""Benchmarks that are scripts of one file: what they make of what they measure; benchmarks/gpu.py
without a GPU."""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import avx2
import first_step
import gpu
import gpu_checks
import pytest
import second_stage
import torch
import whole_steps
from llvmlite.binding import get_host_cpu_features
from script_runs import MPIRUN, ROOT, run

from hvd_adaptive.tools.methods import parse

BENCHMARKS = ROOT / "benchmarks"
needs_avx2 = pytest.mark.skipif(not get_host_cpu_features().get("avx2"), reason="no AVX2 here")


def cells_of(printed: str) -> list[list[str]]:
    rows = [line for line in printed.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]


def test_a_cold_and_a_warm_launch_share_a_folder(monkeypatch, capsys):
    folders = []

    def launched(method, count, folder):
        folders.append(folder)
        cold = folders.count(folder) == 1
        return [10.0 * count if cold else 0.5 * count, 0.2, *[0.1] * 10]

    monkeypatch.setattr(first_step, "launched", launched)
    words = ["--ranks", "2", "4", "--methods", "ALQ(bits=3)", "--launches", "2"]
    assert first_step.main(words) == 0
    assert len(folders) == 8 and len(set(folders)) == 4
    assert cells_of(capsys.readouterr().out) == [
        ["ALQ(bits=3)", "2", "20", "1", "0.2", "0.1"],
        ["ALQ(bits=3)", "4", "40", "2", "0.2", "0.1"],
    ]


def test_rows_are_medians_and_ratios_to_float16(monkeypatch, capsys):
    plans = []

    def launched(plan, ranks):
        plans.append((plan["case"], ranks))
        return {
            "float16": [(0.02, 0.01), (0.03, 0.02), (0.9, 0.9)],
            "ALQ(bits=3)": [(0.06, 0.03)],
        }

    monkeypatch.setattr(whole_steps, "launched", launched)
    assert whole_steps.main(["--cases", "10x20", "conv", "--ranks", "3"]) == 0
    assert plans == [("10x20", 3), ("conv", 3)]
    cells = cells_of(capsys.readouterr().out)
    assert cells[:2] == [
        ["10x20", "float16", "30.0", "1.00", "20.0", "1.00"],
        ["10x20", "ALQ(bits=3)", "60.0", "2.00", "30.0", "1.50"],
    ]
    assert [row[0] for row in cells] == ["10x20", "10x20", "conv", "conv"]


@pytest.mark.parametrize("case", ["7x30", "conv"])
def test_a_backward_pass_fires_every_hook(case):
    named, backward = whole_steps.conv(0) if case == "conv" else whole_steps.chain(case, 0)
    fired = []
    for name, parameter in named:
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: fired.append(name))
    backward()
    assert sorted(fired) == sorted(name for name, _ in named)
    assert all(torch.isfinite(parameter.grad).all() for _, parameter in named)
    assert sum(p.numel() for _, p in named) == {"7x30": 210, "conv": 2_641_674}[case]


# benchmarks/second_stage.py


@pytest.mark.parametrize("ranks", [2, 4])
def test_stages_of_normal_gradients(ranks):
    """Of equal gradients the first stage's error is that of one rank, divided by the ranks."""
    flat = torch.randn(16 * 8192, generator=torch.Generator().manual_seed(5))
    (method,) = parse(["ALQ(bits=3, symmetric=True)"])
    allgather, *seconds = second_stage._stages(method, [flat] * ranks)
    (alone, *_) = second_stage._stages(method, [flat])
    assert allgather["error"] == pytest.approx(alone["error"] / ranks, rel=0.1)
    packed = 3 + 32 / 8192
    assert allgather["bits sent"] == pytest.approx(packed * (ranks - 1))
    assert [row["second stage"][:1] for row in seconds] == list("345678")[: len(seconds)]
    assert [row["second stage"].endswith("*") for row in seconds[-3:]] == [False, True, False]
    for fewer, more in itertools.pairwise(seconds):
        assert more["added"] < fewer["added"] / 2 and more["error"] < fewer["error"]
    for bits, row in enumerate(seconds, 3):
        total = row["first error"] * (1 + row["added"])  # the second stage is unbiased
        assert row["error"] == pytest.approx(total, rel=0.1)
        sent = (packed + bits + 32 / 8192) * (ranks - 1) / ranks
        assert row["bits sent"] == pytest.approx(sent)


@pytest.mark.parallel
@pytest.mark.thorough
def test_two_processes_train_by_all_methods_of_local_sgd_once(tmp_path: Path) -> None:
    """A second call trains nothing again."""
    kept = tmp_path / "kept.json"
    command = [sys.executable, BENCHMARKS / "local_sgd.py", "--keep", kept]
    command += ["--steps", "7", "--seeds", "1"]
    told = [
        subprocess.run(command, capture_output=True, text=True, timeout=200, check=True).stdout
        for _ in range(2)
    ]
    assert told[0] == told[1] and "float32" in told[0]
    found = json.loads(kept.read_text())
    assert len(found) == 4  # methods
    for name, (quality, sent) in found.items():
        assert 3 < quality < 7, name
        assert sent == 32 if name.startswith("float32") else 0.5 < sent < 0.7


# benchmarks/avx2.py: kernels are compiled for AVX2 alone, and timed.


@needs_avx2
def test_kernels_look_up_eight_entries_at_once():
    features = avx2.without_newer(get_host_cpu_features())
    environment = os.environ | {"NUMBA_CPU_NAME": avx2.NAME, "NUMBA_CPU_FEATURES": features}
    program = "from hvd_adaptive.kernels.numba import lanes; print(lanes.ENTRIES)"
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert found.stdout.strip() == "8", found.stderr


def test_newer_features_are_switched_off():
    features = {"avx2": True, "avx512f": True, "evex512": True, "fma": True, "sse4a": False}
    assert avx2.without_newer(features) == "+avx2,-avx512f,-evex512,+fma,-sse4a"


# benchmarks/footprint.py: it counts the calls of this package, kernels left out.

ROW = re.compile(r"^(.*\S)\s+(\d+)\s+(\d+)\s+([\d,]+)\s+([\d.]+)$", re.MULTILINE)


@pytest.fixture
def footprint():
    pytest.importorskip("horovod.torch")
    return importlib.import_module("footprint")


@pytest.mark.parallel
@pytest.mark.thorough
def test_two_ranks_print_a_row_for_each_door(footprint, tmp_path):
    command = [*MPIRUN, sys.executable, str(BENCHMARKS / "footprint.py"), "--steps", "1", "--list"]
    told = run(command, tmp_path, 120)
    heads, *lists = re.split(r"\n\n", told)
    rows = {row[0]: row[1:] for row in ROW.findall(heads)}
    assert list(rows) == list(footprint.DOORS)
    for (door, row), listed in zip(rows.items(), lists, strict=True):
        name, *lines = listed.strip().splitlines()
        places = [line.split()[1].rpartition(":")[0] for line in lines]
        calls = sum(int(line.split()[0]) for line in lines)
        assert name == door and [len(set(places)), len(places)] == [int(row[0]), int(row[1])]
        assert calls == int(row[2].replace(",", "")) and float(row[3]) == round(calls / 12, 1)
        # Each gradient goes through a door and a codec.
        assert calls > 12 and {place.split("/")[0] for place in places} > {"codec", "hooks"}


def run_gpu(output: Path, *parts: str) -> int:
    small = ["--coordinates", "20000", "--beyond", "100000", "--rounds", "1"]
    return gpu.main(["--device", "cpu", "--output", str(output), *small, "--parts", *parts])


def test_parts_are_kept_and_left_out_the_next_time(tmp_path, capsys, monkeypatch):
    output = tmp_path / "gpu.json"
    monkeypatch.setattr(gpu.codec, "NAMES", ("QSGD",))
    only = {"QSGD(bits=3)": gpu.hvd_adaptive.QSGD(bits=3)}
    monkeypatch.setattr(gpu.codec, "cases", lambda options: only)
    assert run_gpu(output, "facts", "large", "speed") == 0
    kept = json.loads(output.read_text())
    assert kept["large"]["equal"] and kept["large"]["coordinates"] > 100_000
    assert kept["facts"]["torch"] == torch.__version__
    assert "| QSGD(bits=3) | 2.8" in output.with_suffix(".md").read_text()
    capsys.readouterr()
    assert run_gpu(output, "facts", "large", "latency") == 0
    assert "large:" not in capsys.readouterr().out
    assert json.loads(output.read_text())["large"] == kept["large"]


def test_a_wrong_kernel_is_found(tmp_path, monkeypatch):
    """Of one coordinate in the last bucket, beyond the others."""
    encode = gpu_checks.kernels.for_device(torch.device("cpu")).encode

    def wrong(flat, *args):
        encode(flat, *args)
        args[1][-1] ^= 1 << 5

    module = gpu_checks.kernels.for_device(torch.device("cpu"))
    monkeypatch.setattr(module, "encode", wrong)
    output = tmp_path / "gpu.json"
    assert run_gpu(output, "large") == 1
    large = json.loads(output.read_text())["large"]
    assert large["scales"] and not large["codes"]


def test_differing_payloads_are_told():
    scheme = gpu.hvd_adaptive.QSGD(bits=3, bucket_size=100)
    flat = gpu_checks.sample(1000, torch.device("cpu"))
    assert gpu_checks.compared(scheme, flat, torch.device("cpu")) == "equal"
    encode = scheme.encode
    scheme.encode = lambda flat, seed, calls=[]: encode(
        flat, seed=seed + len(calls.append(0) or calls)
    )
    assert gpu_checks.compared(scheme, flat, torch.device("cpu")).startswith("payload: ")


def test_a_case_that_fails_does_not_end_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_checks, "SIZES", ((7, 60),))
    right = gpu_checks.compared

    def compared(scheme, flat, device):
        if scheme.parts.default.name == "signsgd":
            raise RuntimeError("no")
        if scheme.parts.default.name == "onebit":
            raise ModuleNotFoundError("No module named 'numba'")
        return right(scheme, flat, device)

    monkeypatch.setattr(gpu_checks, "compared", compared)
    assert run_gpu(tmp_path / "gpu.json", "equal") == 1
    told = json.loads((tmp_path / "gpu.json").read_text())["equal"]
    assert told["differ"] == ["SignSGD(), bucket 7"]
    assert told["OneBitSGD(), bucket 7"].startswith("left out")
    assert told["QSGD(bits=8), bucket 7"] == "equal"


def test_a_part_that_failed_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "TEST_MODULES", ("json", "no_such_module"))
    assert gpu.suite(None) == {"status": "left out: no no_such_module here"}
    output = tmp_path / "gpu.json"
    monkeypatch.setitem(gpu.PARTS, "facts", lambda arguments: {"error": "no"})
    assert run_gpu(output, "facts") == 1
    monkeypatch.setitem(gpu.PARTS, "facts", lambda arguments: {"card": "x"})
    assert run_gpu(output, "facts") == 0


def test_commands_end_with_the_time(monkeypatch):
    monkeypatch.setattr(gpu, "LEAST_S", 0.3)
    late = argparse.Namespace(end=time.monotonic() - gpu.SPARE_S)
    slow = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(30)"]
    told = gpu.finished(slow, dict(os.environ), late, lines=3)
    assert told["status"] == gpu.STOPPED and told["s"] < 10 and gpu.failed(told)
    told = gpu.finished(
        [sys.executable, "-c", "print(1); exit(3)"],
        dict(os.environ),
        argparse.Namespace(end=time.monotonic() + 20),
        lines=3,
    )
    assert told["status"] == 3 and told["end"] == ["1"]


def test_what_counts_as_a_failure():
    good = ({"differ": []}, {"status": 0}, {"status": "left out"})
    two = {"build": {"status": 0}, "run": {"status": 1}}
    bad = ({"differ": ["ALQ"]}, {"error": "x"}, {"status": 2}, two)
    assert not any(map(gpu.failed, good)) and all(map(gpu.failed, bad))
