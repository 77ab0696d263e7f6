"""The Triton kernels compile for a GPU that is not there, in seconds; nothing is fused or
approximate."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).with_name("compile_triton.py")


def test_kernels_compile_without_fused_products():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {
        "_fused_kernel",
        "_pack_kernel",
        "_decode_kernel",
        "_norms_kernel",
        "_orq_kernel",
        "_round_kernel",
        "_transform_kernel",
    } <= {name for name, *_ in lines}
    for name, *flaws in lines:
        assert not flaws, f"{name}: {flaws}"
