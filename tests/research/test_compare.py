"""compare.py, end to end, on runs of a few steps: files, figures, page, resuming, refusals."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from pages import check_figures
from script_runs import ROOT, run

from hvd_adaptive import simulate

pytest.importorskip("sklearn")
pytest.importorskip("mlxtend")
pytestmark = [pytest.mark.integration, pytest.mark.timeout(330)]

METHODS = ["SGD", "SuperSGD", "QSGD", "TernGrad", "ALQ"]
FLAGS = ["--task", "resnet8", "--methods", *METHODS, "--output-dir", "runs"]
FLAGS += shlex.split("--seeds 2 --steps 3 --bucket-size 2048 --sweeps bits --budgets 1.6")
THREE_LEVELS = ["ORQ-3", "Linear-3", "QSGDinf-3", "ORQ-3-clip", "QCS-20"]
FIGURES = {"variance_on_trajectory", "variance_in_training", "loss_and_accuracy"}
FIGURES |= {"normalized_variance", "final_levels", "fits", "sweeps", "equal_bits"}


def compare(cwd: Path, *flags: str) -> str:
    return run([sys.executable, str(ROOT / "research" / "compare.py"), *flags], cwd, 300)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, str]:
    """The folder of one comparison, and what it printed."""
    folder = tmp_path_factory.mktemp("compare")
    return folder, compare(folder, *FLAGS, "--results", "page/results.md")


def rows_of(folder: Path, method: str, of: str, seed: int = 0) -> list[dict]:
    return simulate.Result.read(folder / f"runs/resnet8/{method}-{of}-3t-{seed}.csv").rows


def final(folder: Path, method: str, of: str, seed: int = 0) -> float:
    return 100 * rows_of(folder, method, of, seed)[-1]["validation_accuracy"]


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
    first = [
        [
            rows_of(made[0], method, f"4w-{of}", seed)[0]["loss"]
            for method, of in (("SuperSGD", "32b-0d"), ("ALQ", "3b-2048d"), ("QSGD", "3b-2048d"))
        ]
        for seed in (0, 1)
    ]
    assert [len(set(of_seed)) for of_seed in first] == [1, 1] and first[0] != first[1]


@pytest.mark.thorough
def test_methods_of_a_budget_send_as_many_bits(made):
    folder, _ = made
    reference = rows_of(folder, "TernGrad", "4w-3b-2048d")[-1]["bits_per_coordinate"]
    for method in THREE_LEVELS:
        bits = rows_of(folder, method, "4w-0b-2048d")[-1]["bits_per_coordinate"]
        assert bits == pytest.approx(reference, rel=0.025), method
    told = simulate.Result.read(folder / "runs/resnet8/QCS-20-4w-0b-2048d-3t-0.csv")
    assert told.settings["run"]["keywords"] == {"gain": 20}


@pytest.mark.thorough
def test_page(made):
    folder, printed = made
    page = (folder / "page/results.md").read_text()
    check_figures(page, folder / "page/images", FIGURES, least=4_000)
    assert "    python research/compare.py --task resnet8 --methods" in page
    rows = [line for line in page.splitlines() if line.startswith("| ALQ |")]
    accuracy = sum(final(folder, "ALQ", "4w-3b-2048d", seed) for seed in (0, 1)) / 2
    assert rows[0].split(" | ")[1] == f"{accuracy:.2f}"
    claims = re.findall(
        r"^- \*\*(Holds|Does not hold|Not decided)\*\* \((?:p [=<]|computed)", page, re.M
    )
    assert len(claims) == page.count("\n- **") >= 20
    # Two seeds decide next to nothing among so many claims.
    assert claims.count("Not decided") >= 20
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
    compare(folder, *FLAGS, *small)
    assert kept.stat().st_mtime_ns == stamp
    assert '"rate": 0.05' in other.read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [("--methods ALG", "invalid choice: 'ALG'"), ("--steps 3 --epochs 1", "not allowed with")],
)
def test_bad_flags_are_refused(flags, message, capsys):
    import compare

    with pytest.raises(SystemExit):
        compare.make_parser().parse_args(flags.split())
    assert message in capsys.readouterr().err


def test_a_run_that_fails_is_told(tmp_path, monkeypatch):
    import compare

    flags = f"--task resnet8 --methods ALQ --seeds 1 --steps 2 --bits 9 --output-dir {tmp_path}"
    monkeypatch.setattr(sys, "argv", ["compare.py", *flags.split()])
    monkeypatch.setattr(compare.signal, "signal", lambda *_: None)
    told = compare.main()
    assert "bits=9" in told and "method='ALQ'" in told
