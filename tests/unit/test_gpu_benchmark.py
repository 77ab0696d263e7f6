"""benchmarks/gpu.py without a GPU: its parts run, it goes on where it ended, failures are told."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

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


@pytest.mark.parametrize(
    ("result", "bad"),
    [
        ({"differ": []}, False),
        ({"differ": ["ALQ"]}, True),
        ({"error": "x"}, True),
        ({"status": 0}, False),
        ({"status": 2}, True),
        ({"build": {"status": 0}, "run": {"status": 1}}, True),
        ({"status": "left out"}, False),
    ],
)
def test_what_counts_as_a_failure(result, bad):
    assert gpu.failed(result) is bad
