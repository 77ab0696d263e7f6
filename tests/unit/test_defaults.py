"""torch's defaults of dtype and device change no bit, and nothing fails under them."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hvd_adaptive

PACKAGE = Path(hvd_adaptive.__file__).parent
TESTS = Path(__file__).resolve().parents[1]
PROGRAM = Path(__file__).with_name("default_digests.py")
# They follow torch's defaults where they are not told; from_numpy, frombuffer and *_like do not.
WITH_DTYPE = {"empty", "zeros", "ones", "full", "linspace", "logspace", "eye", "rand", "randn"}
WITH_DEVICE = WITH_DTYPE | {"tensor", "as_tensor", "asarray", "scalar_tensor", "arange", "randperm"}
# Commands, which run in processes of their own.
COMMANDS = ("tools",)
EVERY = "HVD_ADAPTIVE_EVERY_CASE" in os.environ
SCHEMES, LINES = 24, 77
DEFAULTS = ["float16 meta", "float64 cpu"]


# All schemes with `make ranks`; else three: with fitted tables, bucket tables, and ECDQ.
@pytest.mark.parametrize("defaults", DEFAULTS if EVERY else DEFAULTS[:1])
def test_every_scheme_gives_the_same_bits(defaults):
    part, of = (0, 1) if EVERY else (6, 8)
    done = subprocess.run(
        [sys.executable, PROGRAM, str(part), str(of), "float32 cpu", defaults],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (PACKAGE.parent, TESTS)))},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    usual, other = (one.splitlines()[1:] for one in done.stdout.split("== ")[1:])
    assert len(usual) == SCHEMES // of * LINES and not [line for line in usual if "Error" in line]
    assert other == usual


def factories(path: Path):
    """Calls of torch's factories in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if (
                isinstance(owner, ast.Name)
                and owner.id == "torch"
                and node.func.attr in WITH_DEVICE
            ):
                yield node


def test_no_tensor_is_made_with_a_default():
    """On GPUs and in rare branches, too, which the digests do not reach."""
    wanting, seen = [], 0
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] in COMMANDS:
            continue
        for call in factories(path):
            given = {keyword.arg for keyword in call.keywords}
            seen += 1
            if None in given:  # **HOST names both
                continue
            needed = {"device"} | ({"dtype"} if call.func.attr in WITH_DTYPE else set())
            if not needed <= given:
                wanting.append((str(path.relative_to(PACKAGE)), call.lineno))
    assert seen > 80
    assert not wanting
