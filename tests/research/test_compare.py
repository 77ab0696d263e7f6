"""compare.py, end to end, on runs of a few steps: files, figures, page, resuming, refusals."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_adaptive import simulate

pytest.importorskip("sklearn")
pytest.importorskip("mlxtend")
pytestmark = [pytest.mark.integration, pytest.mark.timeout(330)]

ROOT = Path(__file__).resolve().parents[2]
COMPARE = ROOT / "research" / "compare.py"
METHODS = ["SGD", "SuperSGD", "QSGD", "TernGrad", "ALQ"]
FLAGS = [
    "--task",
    "resnet8",
    "--methods",
    *METHODS,
    "--seeds",
    "2",
    "--steps",
    "3",
    "--bucket-size",
    "2048",
    "--sweeps",
    "bits",
    "--budgets",
    "1.6",
    "--output-dir",
    "runs",
]
THREE_LEVELS = [
    "ORQ-3",
    "Linear-3",
    "QSGDinf-3",
    "ORQ-3-clip",
    "QCS-20",
]
FIGURES = {
    "variance_on_trajectory",
    "variance_in_training",
    "loss_and_accuracy",
    "normalized_variance",
    "final_levels",
    "fits",
    "sweeps",
    "equal_bits",
}


def compare(cwd: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, str(COMPARE), *flags],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        timeout=300,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, str]:
    """The folder of one comparison, and what it printed."""
    folder = tmp_path_factory.mktemp("compare")
    done = compare(folder, *FLAGS, "--results", "page/results.md")
    assert done.returncode == 0, done.stdout
    return folder, done.stdout


@pytest.mark.thorough
def test_runs_are_files_with_their_settings(made):
    folder, _ = made
    files = sorted(path.name for path in (folder / "runs/resnet8").iterdir())
    # Of 2 seeds: 5 methods; ALQ and QSGD with 2 and 4 bits; the trajectory; the fits; those of
    # three levels and ECDQ; the QSGD and NUQSGD papers'.
    assert len(files) == 2 * (5 + 4 + 1 + 1 + 6 + 6), files
    assert not [name for name in files if name.endswith(".part")]
    result = simulate.Result.read(folder / "runs/resnet8/ALQ-4w-3b-2048d-3t-1.csv")
    assert len(result.rows) == 3
    told = result.settings["run"]
    assert (told["method"], told["seed"], told["workers"], told["bits"]) == ("ALQ", 1, 4, 3)
    assert result.rows[-1]["validation_accuracy"] > 0
    assert result.settings["seed"] == 1 and "seed=1" in result.settings["compressor"]
    single = simulate.Result.read(folder / "runs/resnet8/SGD-1w-32b-0d-3t-0.csv")
    assert single.settings["workers"] == 1 and single.settings["compressor"] is None
    path = simulate.Records.read(folder / "runs/resnet8/trajectory-4w-3b-2048d-3t-0.csv")
    assert set(METHODS) < {row["method"] for row in path.rows}


@pytest.mark.thorough
def test_methods_are_paired(made):
    """Equal seeds start from equal weights, on equal minibatches: the first loss is the same."""
    folder, _ = made
    first = {}
    for method, bits in (("SuperSGD", "32b-0d"), ("ALQ", "3b-2048d"), ("QSGD", "3b-2048d")):
        for seed in (0, 1):
            path = folder / f"runs/resnet8/{method}-4w-{bits}-3t-{seed}.csv"
            first[method, seed] = simulate.Result.read(path).rows[0]["loss"]
    for seed in (0, 1):
        assert first["SuperSGD", seed] == first["ALQ", seed] == first["QSGD", seed]
    assert first["ALQ", 0] != first["ALQ", 1]


def final(folder: Path, method: str, bits: int, column: str, seed: int = 0) -> float:
    path = folder / f"runs/resnet8/{method}-4w-{bits}b-2048d-3t-{seed}.csv"
    return simulate.Result.read(path).rows[-1][column]


@pytest.mark.thorough
def test_methods_of_a_budget_send_as_many_bits(made):
    folder, _ = made
    reference = final(folder, "TernGrad", 3, "bits_per_coordinate")
    for method in THREE_LEVELS:
        bits = final(folder, method, 0, "bits_per_coordinate")
        assert bits == pytest.approx(reference, rel=0.025), method
    told = simulate.Result.read(folder / "runs/resnet8/QCS-20-4w-0b-2048d-3t-0.csv")
    assert told.settings["run"]["keywords"] == {"gain": 20}


@pytest.mark.thorough
def test_page_at_equal_bits(made):
    folder, _ = made
    page = (folder / "page/results.md").read_text().split("## At equal wire bits")[1]
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    lines = {row[1]: row for row in rows if len(row) == 8}
    assert {*THREE_LEVELS, "ECDQ-1.6", "*TernGrad*"} <= set(lines)
    for method in THREE_LEVELS:
        deficits = []
        for seed in (0, 1):
            own = final(folder, method, 0, "validation_accuracy", seed)
            exact = simulate.Result.read(folder / f"runs/resnet8/SuperSGD-4w-32b-0d-3t-{seed}.csv")
            deficits.append(100 * (exact.rows[-1]["validation_accuracy"] - own))
        assert float(lines[method][4]) == pytest.approx(sum(deficits) / 2, abs=0.006), method
    assert "ORQ-3 trains to higher accuracy than Linear-3 and QSGDinf-3" in page


@pytest.mark.thorough
def test_figures(made):
    folder, _ = made
    assert {path.stem for path in (folder / "page/images").iterdir()} == FIGURES
    for path in (folder / "page/images").iterdir():
        head = path.read_bytes()[:24]
        assert head[:8] == b"\x89PNG\r\n\x1a\n"
        assert min(struct.unpack(">II", head[16:24])) >= 300
        assert 4_000 < path.stat().st_size < 120_000


@pytest.mark.thorough
def test_page(made):
    folder, printed = made
    page = (folder / "page/results.md").read_text()
    assert "    python research/compare.py --task resnet8 --methods" in page
    rows = [line for line in page.splitlines() if line.startswith("| ALQ |")]
    accuracy = [
        100
        * simulate.Result.read(folder / f"runs/resnet8/ALQ-4w-3b-2048d-3t-{seed}.csv").rows[-1][
            "validation_accuracy"
        ]
        for seed in (0, 1)
    ]
    assert rows[0].split(" | ")[1] == f"{sum(accuracy) / 2:.2f}"
    claims = re.findall(
        r"^- \*\*(Holds|Does not hold|Not decided)\*\* \((?:p [=<]|computed)", page, re.M
    )
    assert len(claims) == page.count("\n- **") >= 20
    # Two seeds decide next to nothing among so many claims.
    assert claims.count("Not decided") >= 20
    for figure in FIGURES:
        assert f"(images/{figure}.png)" in page
    assert "ALQ" in printed and "\x1b" not in printed and "run/s" not in printed


@pytest.mark.thorough
def test_finished_runs_are_not_made_again(made):
    folder, _ = made
    kept = folder / "runs/resnet8/QSGD-4w-3b-2048d-3t-0.csv"
    other = folder / "runs/resnet8/QSGD-4w-3b-2048d-3t-1.csv"
    stamp = kept.stat().st_mtime_ns
    # Made with other settings: it must be made again.
    other.write_text(other.read_text().replace('"rate": 0.05', '"rate": 0.06'))
    small = ["--methods", "QSGD", "SuperSGD", "--sweeps", "--budgets"]
    done = compare(folder, *FLAGS, *small)
    assert done.returncode == 0, done.stdout
    assert kept.stat().st_mtime_ns == stamp
    assert '"rate": 0.05' in other.read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--methods", "ALG"], "invalid choice: 'ALG'"),
        (["--steps", "3", "--epochs", "1"], "not allowed with"),
    ],
    ids=["method", "length"],
)
def test_refuses_bad_flags(flags, message, tmp_path):
    done = compare(tmp_path, *flags)
    assert done.returncode == 2
    assert message in done.stdout and "Traceback" not in done.stdout


def test_a_run_that_fails_is_told(tmp_path):
    done = compare(
        tmp_path,
        "--task",
        "resnet8",
        "--methods",
        "ALQ",
        "--seeds",
        "1",
        "--steps",
        "2",
        "--bits",
        "9",
    )
    assert done.returncode == 1
    assert "bits=9" in done.stdout and "method='ALQ'" in done.stdout
