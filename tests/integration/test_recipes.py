"""The recipes of docs/recipes.md, each on two processes, where its library is installed."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from script_runs import ROOT, run

SECONDS = 280
LINES = 60
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# Library, and the loss that a training of 60 steps must reach.
RECIPES = {
    "trainer": ("transformers", 3.3),
    "accelerate": ("accelerate", 1.0),
    "lightning": ("lightning", 1.0),
}


@pytest.mark.integration
@pytest.mark.parallel
@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_with_three_bits(name: str, tmp_path: Path) -> None:
    library, reached = RECIPES[name]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install 'hvd-adaptive[recipes]'")
    script = ROOT / "examples" / f"recipe_{name}.py"
    done = run([*TORCHRUN, str(script)], tmp_path, SECONDS)
    assert done.returncode == 0, done.stdout
    (last,) = re.findall(r"loss (?:[\d.]+ to )?(\d+\.\d+)", done.stdout)
    assert float(last) < reached, done.stdout
    # 3 bits, and headers and scales of a small model; uncompressed gradients have 32 bits, and
    # a hook that was never called reports 0.
    (bits,) = re.findall(r"([\d.]+) bits per coordinate", done.stdout)
    assert 3 < float(bits) < 4, done.stdout


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_short(name: str) -> None:
    lines = (ROOT / "examples" / f"recipe_{name}.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) < LINES
