"""orq_paper.py: a tiny run from end to end, and the numbers its tables rest on."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from exact_error import rounding_error
from pages import command_of, look_up, made, verdicts_of

from hvd_adaptive import ORQ

pytest.importorskip("mlxtend")
import missing_runs
import orq_paper
from orq_gradients import compression_ratio, relative_error, roundtrip
from orq_methods import BY_LEVELS, METHODS, make

pytestmark = [pytest.mark.integration, pytest.mark.timeout(330)]

FIGURES = {"orq_histograms", "orq_error", "orq_accuracy", "orq_buckets"}
FLAGS = ["--seeds", "1", "--steps", "1", "--buckets", "2048"]
FLAGS += ["--solver-seeds", "1", "--validation", "20"]


@pytest.mark.thorough
def test_end_to_end_and_resumed(tmp_path, monkeypatch):
    words = verdicts_of(made(tmp_path, [*command_of("orq"), *FLAGS], FIGURES))
    # One seed decides nothing; the two claims on bytes are computed.
    assert len(words) == 45 and sum(word != "Not decided" for word, _ in words) == 2
    assert {how for word, how in words if word != "Not decided"} == {"computed"}
    look_up(tmp_path / "docs", monkeypatch, "orq.md")
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*.csv")}
    # Fig. 1's, errors and solvers of a trajectory; full precision, 12 methods, 4 at Table 4's
    # bucket size, with and without 2 clipping factors; full precision and 6 methods on 4 workers.
    assert len(stamps) == 3 + 1 + 12 + 4 * 3 + 7
    removed, foreign = (p for p in stamps if p.stem.startswith(("ORQ-9-2048d", "errors")))
    removed.unlink()
    foreign.write_text(foreign.read_text().replace('"rate": 0.01', '"rate": 0.02'))
    found = {job.path(tmp_path / "runs") for job in missing(tmp_path, monkeypatch)}
    assert found == {removed, foreign}


def missing(cwd: Path, monkeypatch: pytest.MonkeyPatch) -> list:
    """What the command would make now."""
    jobs = []
    monkeypatch.chdir(cwd)
    monkeypatch.setattr(sys, "argv", [*command_of("orq"), *FLAGS][1:])
    monkeypatch.setattr(missing_runs.signal, "signal", lambda *_: None)
    monkeypatch.setattr(missing_runs.torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(missing_runs, "execute", lambda found, *_: jobs.extend(found) or ["told"])
    with pytest.raises(SystemExit, match=r"^told$"):
        orq_paper.main()
    return jobs


@pytest.mark.parametrize("levels", [3, 9])
def test_expected_error_is_the_mean_of_draws(levels):
    flat = torch.randn(3000, generator=torch.Generator().manual_seed(levels)) ** 3
    codec = ORQ(levels=levels, bucket_size=512)
    draws = torch.tensor(
        [relative_error(roundtrip(codec, flat, step), flat) for step in range(200)]
    )
    error = float(draws.std()) / math.sqrt(len(draws))
    assert rounding_error(codec, flat) == pytest.approx(float(draws.mean()), abs=5 * error)


def test_ratio_counts_every_byte():
    """Levels of float32, codes of 20, 12 and 10 to 32, 28 and 32 bits, a header of 96 bytes."""
    for levels, bits in ((3, 32 / 20), (5, 28 / 12), (9, 32 / 10)):
        for size in (128, 8192):
            payload = 96 + 4 * levels * math.ceil(100_000 / size) + 100_000 * bits / 8
            ratio = compression_ratio(ORQ(levels=levels, bucket_size=size), 100_000)
            # A chunk of codes that is not full takes some words more.
            assert ratio == pytest.approx(400_000 / payload, rel=0.005)


def test_methods_have_the_levels_they_are_listed_under():
    flat = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    for levels, methods in BY_LEVELS.items():
        for method in methods:
            coded = roundtrip(make(method, flat.numel()), flat, 0)
            assert coded.unique().numel() == levels, method
    assert sum(map(len, BY_LEVELS.values())) == len(METHODS)
