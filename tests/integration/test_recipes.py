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
# The loss that a training of 60 steps must reach.
RECIPES = {"trainer": 3.3, "accelerate": 1.0, "lightning": 1.0}


def check_recipe(name: str, told: str) -> None:
    """The loss falls. 3 bits, and headers and scales of a small model; uncompressed gradients have
    32 bits, and a hook that was never called reports 0."""
    (last,) = re.findall(r"loss (?:[\d.]+ to )?(\d+\.\d+)", told)
    assert float(last) < RECIPES[name], told
    (bits,) = re.findall(r"([\d.]+) bits per coordinate", told)
    assert 3 < float(bits) < 4, told


@pytest.mark.thorough
@pytest.mark.integration
@pytest.mark.parallel
@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_with_three_bits(name: str, tmp_path: Path) -> None:
    """Started by torchrun. Their libraries train in test_integrations, too."""
    done = run([*TORCHRUN, str(ROOT / "examples" / f"recipe_{name}.py")], tmp_path, SECONDS)
    assert done.returncode == 0, done.stdout
    check_recipe(name, done.stdout)


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> str:
    """What fork_trainers.py prints: the libraries are imported once."""
    checks = sorted(map(str, FOLDER.glob("check_*.py")))
    program = [sys.executable, str(FOLDER / "fork_trainers.py")]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OPAL_PREFIX", raising=False)
        done = run([*program, str(tmp_path_factory.mktemp("runs")), "2", *checks], ROOT, SECONDS)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.integration
@pytest.mark.parallel
@pytest.mark.timeout(SECONDS + 30)
def test_integrations(told: str) -> None:
    """Every check passes on every rank."""
    assert told.count(" passed") == 2, told


@pytest.mark.integration
@pytest.mark.parallel
@pytest.mark.timeout(SECONDS + 30)
def test_new_processes_repeat_the_uninterrupted_training(told: str) -> None:
    """By Trainer, Lightning and Accelerate: parameters and residuals, bit for bit."""
    found = re.findall(r"^(whole|rest) (\w+ rank=\d hash=[0-9a-f]{64})$", told, re.MULTILINE)
    whole, rest = ({line for part, line in found if part == name} for name in ("whole", "rest"))
    assert len(whole) == 6 and whole == rest
    check_recipe("accelerate", told)


@pytest.mark.integration
@pytest.mark.timeout(SECONDS + 30)
def test_lightning_without_a_launcher(told: str) -> None:
    """With Open MPI from PyPI; torchrun starts the recipes above."""
    assert "made without a launcher" in told
