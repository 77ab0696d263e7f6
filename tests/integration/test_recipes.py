"""The recipes of docs/recipes.md, and hvd_adaptive.integrations in the libraries, on two ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from recipe_results import RECIPES, check_recipe
from script_runs import ROOT, run

SECONDS = 280
FOLDER = Path(__file__).parent / "trainers"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
pytestmark = [pytest.mark.integration, pytest.mark.parallel, pytest.mark.timeout(SECONDS + 30)]


@pytest.mark.thorough
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_with_three_bits(name: str, tmp_path: Path) -> None:
    """Started by torchrun. Their libraries train in test_integrations, too."""
    done = run([*TORCHRUN, str(ROOT / "examples" / f"recipe_{name}.py")], tmp_path, SECONDS)
    assert done.returncode == 0, done.stdout
    check_recipe(name, done.stdout)


def test_integrations(tmp_path: Path, monkeypatch) -> None:
    """Every check passes on every rank, and new processes resume what others have begun. With Open
    MPI from PyPI, Lightning needs no launcher."""
    monkeypatch.delenv("OPAL_PREFIX", raising=False)
    fresh = str(FOLDER / "check_fresh.py")
    checks = sorted(set(map(str, FOLDER.glob("check_*.py"))) - {fresh})
    words = ["2", *checks]
    for part in ("whole", "rest"):
        words += ["/", f"PART={part}", f"RUNS={tmp_path}", "2", fresh]
    done = run([sys.executable, str(FOLDER / "fork_trainers.py"), *words], ROOT, SECONDS)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(" passed") == 6, done.stdout
    assert "made without a launcher" in done.stdout
