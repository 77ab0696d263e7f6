"""research/defaults.py: its texts, its figures by hand, and that finished runs are kept."""

from __future__ import annotations

import statistics

import pytest
import torch
from scipy import stats

from hvd_adaptive.simulate import Result

pytest.importorskip("mlxtend")
import defaults
import defaults_page as page
import defaults_runs as runs

PAPER = "ALQ(bits=3, norm='l2', symmetric=True, keep_zeros=False)"
DEFAULT = "ALQ(bits=3, norm='linf', symmetric=False)"


def test_texts_have_so_many_words_of_a_class_each():
    (train, _), (test, _) = runs.texts()
    assert train.shape == (20_000, 20) and test.shape == (2000, 20)
    words = train.unique()
    assert len(words) == 999 and words.min() > 0 and words.max() < 2000
    assert set(test.unique().tolist()) <= set(words.tolist())
    # Each part of the embedding has rows without a word.
    assert all(
        50 < int(((words >= at) & (words < at + 200)).sum()) < 150 for at in range(0, 2000, 200)
    )


def test_padding_is_behind_the_words_of_the_same_texts():
    (short, y), _ = runs.data_of(runs.TASKS["sums-20"])
    (long, z), _ = runs.data_of(runs.TASKS["sums-200"])
    assert torch.equal(long[:, :20], short) and torch.equal(y, z)
    assert long.shape == (20_000, 200) and not long[:, 20:].any()


def test_movement_by_hand():
    movement = runs.movement
    before = torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0], [3.0, 0.0]])
    used = torch.tensor([[0, 1], [1, 1]])
    learnt = before + torch.tensor([[0.0], [5.0], [0.0], [0.0]])
    kept = {"rms": 0.0, "unchanged": True, "padding_unchanged": True}
    assert movement(before, learnt, used) == kept
    signed = learnt.clone()
    signed[3, 1], signed[0, 0] = -0.0, -0.0  # equal numbers, other bits
    assert movement(before, signed, used) == dict.fromkeys(kept, False) | {"rms": 0.0}
    moved = learnt + torch.tensor([[0.0], [0.0], [0.5], [-0.5]])
    assert movement(before, moved, used) == kept | {"rms": 0.5, "unchanged": False}


def result(loss: float, accuracy: float, moved: bool) -> Result:
    figures = {"rms": 0.25 * moved, "unchanged": not moved, "padding_unchanged": True}
    row = {"validation_accuracy": accuracy, "bits_per_coordinate": 3.0, "relative_error": 0.5}
    return Result({"training_loss": loss, "rows": figures}, [row])


def test_differences_are_paired_by_seed():
    own = {"float32": ((0.5, 0.6, 0.7), (0.8, 0.7, 0.6)), PAPER: ((0.6, 0.8, 0.8), (0.7, 0.7, 0.5))}
    made = [
        (page.Run("bags-sgd", method, seed, 5), result(losses[seed], hits[seed], method == PAPER))
        for method, (losses, hits) in own.items()
        for seed in (2, 0, 1)
    ]
    float32, paper = page.rows(made)
    half = stats.t.ppf(0.975, 2) / 3**0.5
    losses = f"+0.133 ± {half * statistics.stdev([0.1, 0.2, 0.1]):.3f}"
    points = f"-6.67 ± {half * statistics.stdev([-10, 0, -10]):.2f}"
    assert float32 == ("float32", "3.00", "0.600", "-", "70.00", "-", "0", "yes", "yes")
    assert paper == (PAPER, "3.00", "0.733", losses, "63.33", points, "0.25", "no", "yes")
    assert [page.told(each) for each in ([1, 1], [0, 0], [1, 0, 1])] == ["yes", "no", "2 of 3"]
    assert page.claims({"bags-sgd": page.Seeds(made)}) == []  # tasks are missing


def test_errors_of_windows_by_hand():
    errors = [*([0.1] * 60 + [9.0] * 40), *([0.2] * 100), 0.3, 0.4, 0.8]
    rows = [{"relative_error": error, "validation_accuracy": 0.5} for error in errors]
    run = page.Run("lenet", "EDEN(bits=2)", 0, len(errors))
    (line,) = page.window_rows([(run, Result({}, rows))])
    assert line == ("EDEN(bits=2)", "0.100", "0.200", "0.400", "50.0")
    titles = ("method", "to step\n100", "to step\n200", "to step\n203", "accuracy,\n%")
    assert page.headings([(run, None)]) == titles


@pytest.mark.integration
@pytest.mark.thorough
def test_end_to_end_and_kept(tmp_path, capsys, monkeypatch):
    written = tmp_path / "page.md"
    arguments = ["--tasks", "bags-adam", "lenet", "--methods", PAPER, DEFAULT, "--steps", "3"]
    arguments += ["--paired-seeds", "2", "--output-dir", str(tmp_path / "runs")]
    monkeypatch.setattr(defaults, "TABLE_METHODS", ("float32", "EDEN(bits=2)"))
    assert defaults.main([*arguments, "--page", str(written)]) == 0
    text = written.read_text(encoding="utf-8")
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    lines = {row[0].strip("`"): row[1:] for row in cells if len(row) == 9}
    assert [lines[method][-2:] for method in ("float32", PAPER, DEFAULT)] == [
        ["yes", "yes"],
        ["no", "no"],
        ["yes", "yes"],
    ]
    # Adam moves a row by about its rate at each step.
    assert 0.005 < float(lines[PAPER][5]) < 0.03 and float(lines[DEFAULT][5]) == 0
    assert "| `EDEN(bits=2)` | 0." in text and "## Claims" not in text
    printed = capsys.readouterr().out
    monkeypatch.setattr("missing_runs.execute", lambda jobs, *_: [f"{job}" for job in jobs])
    assert defaults.main(arguments) == 0
    assert capsys.readouterr().out == printed
