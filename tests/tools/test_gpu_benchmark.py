"""benchmarks/gpu.py without a GPU: its parts run, it goes on where it ended, failures are told."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import gpu
import gpu_checks
import torch


def run(output: Path, *parts: str) -> int:
    small = ["--coordinates", "20000", "--beyond", "100000", "--rounds", "1"]
    return gpu.main(["--device", "cpu", "--output", str(output), *small, "--parts", *parts])


def test_parts_are_kept_and_left_out_the_next_time(tmp_path, capsys, monkeypatch):
    output = tmp_path / "gpu.json"
    monkeypatch.setattr(gpu.codec, "NAMES", ("QSGD",))
    only = {"QSGD(bits=3)": gpu.hvd_adaptive.QSGD(bits=3)}
    monkeypatch.setattr(gpu.codec, "cases", lambda options: only)
    assert run(output, "facts", "large", "speed") == 0
    kept = json.loads(output.read_text())
    assert kept["large"]["equal"] and kept["large"]["coordinates"] > 100_000
    assert kept["facts"]["torch"] == torch.__version__
    assert "| QSGD(bits=3) | 2.8" in output.with_suffix(".md").read_text()
    capsys.readouterr()
    assert run(output, "facts", "large", "latency") == 0
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
    assert run(output, "large") == 1
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
    assert run(tmp_path / "gpu.json", "equal") == 1
    told = json.loads((tmp_path / "gpu.json").read_text())["equal"]
    assert told["differ"] == ["SignSGD(), bucket 7"]
    assert told["OneBitSGD(), bucket 7"].startswith("left out")
    assert told["QSGD(bits=8), bucket 7"] == "equal"


def test_a_part_that_failed_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "TEST_MODULES", ("json", "no_such_module"))
    assert gpu.suite(None) == {"status": "left out: no no_such_module here"}
    output = tmp_path / "gpu.json"
    monkeypatch.setitem(gpu.PARTS, "facts", lambda arguments: {"error": "no"})
    assert run(output, "facts") == 1
    monkeypatch.setitem(gpu.PARTS, "facts", lambda arguments: {"card": "x"})
    assert run(output, "facts") == 0


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
