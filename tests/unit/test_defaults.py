"""torch's defaults of dtype and device change no bit, and nothing fails under them."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import hvd_adaptive

PACKAGE = Path(hvd_adaptive.__file__).parent
TESTS = Path(__file__).resolve().parents[1]
# They follow torch's defaults where they are not told; from_numpy, frombuffer and *_like do not.
WITH_DTYPE = {"empty", "zeros", "ones", "full", "linspace", "logspace", "eye", "rand", "randn"}
WITH_DEVICE = WITH_DTYPE | {"tensor", "as_tensor", "asarray", "scalar_tensor", "arange", "randperm"}
# Commands, which run in processes of their own.
COMMANDS = ("tools",)
EVERY = "HVD_ADAPTIVE_EVERY_CASE" in os.environ
SCHEMES, LINES = 24, 99
DEFAULTS = [("float16", "cpu"), ("float32", "meta"), ("float64", "cpu"), ("bfloat16", "cpu")]
# All schemes under each default with `make ranks`; else a quarter of them under each of two.
CASES = [
    (dtype, device, 0 if EVERY else 2 * part, 1 if EVERY else 4)
    for part, (dtype, device) in enumerate(DEFAULTS if EVERY else DEFAULTS[:2])
]


@cache
def digests(dtype: str, device: str, part: int = 0, of: int = 1) -> list[str]:
    """Of every scheme, or of one of ``of`` in turn, from number ``part`` on."""
    program = Path(__file__).with_name("default_digests.py")
    done = subprocess.run(
        [sys.executable, program, dtype, device, str(part), str(of)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (PACKAGE.parent, TESTS)))},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize(("dtype", "device", "part", "of"), CASES)
def test_every_scheme_gives_the_same_bits(dtype, device, part, of):
    usual, told = digests("float32", "cpu", part, of), digests(dtype, device, part, of)
    assert len(usual) == SCHEMES // of * LINES and not [line for line in usual if "Error" in line]
    assert told == usual


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
