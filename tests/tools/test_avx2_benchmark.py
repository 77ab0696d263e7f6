"""benchmarks/avx2.py: kernels are compiled for AVX2 alone, and timed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from llvmlite.binding import get_host_cpu_features

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
needs_avx2 = pytest.mark.skipif(not get_host_cpu_features().get("avx2"), reason="no AVX2 here")


@pytest.fixture
def avx2(monkeypatch):
    import avx2

    yield avx2
    sys.modules.pop("avx2")


@needs_avx2
def test_kernels_look_up_eight_entries_at_once(avx2):
    features = avx2.without_newer(get_host_cpu_features())
    environment = os.environ | {"NUMBA_CPU_NAME": avx2.NAME, "NUMBA_CPU_FEATURES": features}
    program = "from hvd_adaptive.kernels.numba import permute; print(permute.ENTRIES)"
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert found.stdout.strip() == "8", found.stderr


def test_newer_features_are_switched_off(avx2):
    features = {"avx2": True, "avx512f": True, "evex512": True, "fma": True, "sse4a": False}
    assert avx2.without_newer(features) == "+avx2,-avx512f,-evex512,+fma,-sse4a"


@needs_avx2
@pytest.mark.thorough
def test_arguments_are_those_of_the_command():
    command = [sys.executable, str(BENCHMARKS / "avx2.py"), "--json", "--schemes", "ALQ"]
    command += ["--bits", "3", "--codings", "fixed", "--coordinates", "100000", "--rounds", "1"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    assert "ALQ(bits=3)" in json.dumps(json.loads(found.stdout))
