"""The recipes of docs/recipes.md, and hvd_adaptive.integrations in the libraries, on two ranks."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from script_runs import ROOT, run

SECONDS = 280
FOLDER = Path(__file__).parent / "trainers"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
pytestmark = [pytest.mark.integration, pytest.mark.parallel, pytest.mark.timeout(SECONDS + 30)]


@pytest.mark.parametrize(
    ("name", "highest"),  # the loss that a training of 60 steps must reach
    [
        pytest.param("trainer", 3.3, marks=pytest.mark.thorough),
        ("accelerate", 1.0),
        pytest.param("lightning", 1.0, marks=pytest.mark.thorough),
    ],
)
def test_a_recipe_trains_with_three_bits(name: str, highest: float, tmp_path: Path) -> None:
    """Started by torchrun; their libraries train in test_integrations, too. 3 bits, and headers and
    scales of a small model: uncompressed gradients have 32 bits, and a hook that was never called
    reports 0."""
    told = run([*TORCHRUN, str(ROOT / "examples" / f"recipe_{name}.py")], tmp_path, SECONDS)
    (last,) = re.findall(r"loss (?:[\d.]+ to )?(\d+\.\d+)", told)
    (bits,) = re.findall(r"([\d.]+) bits per coordinate", told)
    assert float(last) < highest and 3 < float(bits) < 4, told


def test_integrations(tmp_path: Path, monkeypatch) -> None:
    """Every check passes on every rank, and new processes resume what others have begun. With Open
    MPI from PyPI, Lightning needs no launcher."""
    monkeypatch.delenv("OPAL_PREFIX", raising=False)
    fresh = str(FOLDER / "check_fresh.py")
    checks = sorted(set(map(str, FOLDER.glob("check_*.py"))) - {fresh})
    words = ["2", *checks]
    for part in ("whole", "rest"):
        words += ["/", f"PART={part}", f"RUNS={tmp_path}", "2", fresh]
    told = run([sys.executable, str(FOLDER / "fork_trainers.py"), *words], ROOT, SECONDS)
    assert told.count(" passed") == 6, told
    assert "made without a launcher" in told
