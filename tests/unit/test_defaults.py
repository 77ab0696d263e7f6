"""torch's defaults of dtype and device change no bit, and nothing fails under them."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hvd_adaptive

PACKAGE = Path(hvd_adaptive.__file__).parent
GOLDEN = Path(__file__).resolve().parents[1] / "golden"
PROGRAM = """
import json
import facts, torch
torch.set_num_threads(1)
torch.set_default_dtype(torch.float16)
torch.set_default_device("meta")
found = {section: facts.facts(section) for section in ("payloads", "averages", "zeros", "states")}
print(json.dumps(found))
"""


def test_every_scheme_gives_the_same_bits():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (PACKAGE.parent, GOLDEN)))},
        stdout=subprocess.PIPE,
        text=True,
        timeout=240,
        check=True,
    )
    golden = json.loads((GOLDEN / "golden.json").read_text(encoding="utf-8"))
    found = json.loads(done.stdout)
    assert found == {section: golden[section] for section in found}


# They follow torch's defaults where they are not told; from_numpy, frombuffer and *_like do not.
WITH_DTYPE = {"empty", "zeros", "ones", "full", "linspace", "logspace", "eye", "rand", "randn"}
WITH_DEVICE = WITH_DTYPE | {"tensor", "as_tensor", "asarray", "scalar_tensor", "arange", "randperm"}


def factories(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """Calls of torch's factories in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            owner, _, name = ast.unparse(node.func).rpartition(".")
            if owner == "torch" and name in WITH_DEVICE:
                yield name, node


def test_no_tensor_is_made_with_a_default():
    """On GPUs and in rare branches, too, which are not run here; but for commands, which run in
    processes of their own."""
    wanting, seen = [], 0
    for path in set(PACKAGE.rglob("*.py")) - set((PACKAGE / "tools").rglob("*.py")):
        for name, call in factories(path):
            given = {keyword.arg for keyword in call.keywords}
            needed = {"device", "dtype"} if name in WITH_DTYPE else {"device"}
            seen += 1
            if None not in given and not needed <= given:  # **HOST names both
                wanting.append((str(path.relative_to(PACKAGE)), call.lineno))
    assert seen > 80 and not wanting
