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


@pytest.mark.integration
@pytest.mark.parallel
@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize(
    "name",
    # The others' libraries train in test_integrations, too.
    [pytest.param(n, marks=[pytest.mark.thorough] * (n != "accelerate")) for n in RECIPES],
)
def test_a_recipe_trains_with_three_bits(name: str, tmp_path: Path) -> None:
    reached = RECIPES[name]
    script = ROOT / "examples" / f"recipe_{name}.py"
    done = run([*TORCHRUN, str(script)], tmp_path, SECONDS)
    assert done.returncode == 0, done.stdout
    (last,) = re.findall(r"loss (?:[\d.]+ to )?(\d+\.\d+)", done.stdout)
    assert float(last) < reached, done.stdout
    # 3 bits, and headers and scales of a small model; uncompressed gradients have 32 bits, and
    # a hook that was never called reports 0.
    (bits,) = re.findall(r"([\d.]+) bits per coordinate", done.stdout)
    assert 3 < float(bits) < 4, done.stdout


@pytest.mark.integration
@pytest.mark.parallel
@pytest.mark.timeout(SECONDS + 30)
def test_integrations() -> None:
    """Every check passes on every rank."""
    checks = sorted(map(str, FOLDER.glob("check_*.py")))
    command = [sys.executable, str(FOLDER / "fork_trainers.py"), "2", *checks]
    done = run(command, ROOT, SECONDS)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(" passed") == 2, done.stdout


@pytest.mark.integration
@pytest.mark.parallel
@pytest.mark.timeout(SECONDS + 30)
def test_new_processes_repeat_the_uninterrupted_training(tmp_path: Path) -> None:
    """By Trainer, Lightning and Accelerate: parameters and residuals, bit for bit."""
    hashes = []
    for part in ("whole", "rest"):
        done = run(
            [sys.executable, str(FOLDER / "fresh_runs.py"), str(tmp_path), part], ROOT, SECONDS
        )
        assert done.returncode == 0, done.stdout
        hashes.append(set(re.findall(r"(\w+) rank=(\d) hash=([0-9a-f]{64})", done.stdout)))
    assert len(hashes[0]) == 6 and hashes[0] == hashes[1]


@pytest.mark.integration
def test_lightning_without_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Open MPI from PyPI; torchrun starts the recipes above."""
    monkeypatch.delenv("OPAL_PREFIX", raising=False)
    script = "import lightning, hvd_adaptive.integrations.lightning\n"
    script += "lightning.Trainer(accelerator='cpu', logger=False); print('made')"
    done = run([sys.executable, "-c", script], tmp_path, SECONDS)
    assert done.returncode == 0 and "made" in done.stdout, done.stdout
