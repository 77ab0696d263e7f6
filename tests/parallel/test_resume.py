"""Runs repeat bit for bit: in another launch, over other means, and after a stop half way."""

from __future__ import annotations

import re
from pathlib import Path

import forked
import pytest
from script_runs import ROOT

SECONDS, RANKS = 180, 2
pytestmark = [pytest.mark.parallel, pytest.mark.timeout(3 * SECONDS + 20)]


def trained(folder: Path, program: str, part: str, ranks: int = RANKS) -> set[str]:
    """What ranks tell of each case: its name, the rank, the step, a hash of parameters and
    residuals."""
    (folder / part).mkdir()
    path, words = ROOT / "tests/parallel" / program, [str(folder), part]
    told = forked.run(ranks, path, words, {}, folder / part, SECONDS)
    return set(re.findall(r"\S+ rank=\d (?:step=7 )?hash=[0-9a-f]{64}", told))


def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path):
    """Level tables, code books, second stages, retries, rate control, residuals, warm-up, changed
    settings, schemes without a table."""
    whole = trained(tmp_path, "ranks/resume.py", "whole")
    assert len(whole) == RANKS * 10 and whole == trained(tmp_path, "ranks/resume.py", "rest")


def test_a_run_goes_on_from_a_distributed_checkpoint(tmp_path):
    """Bit for bit with as many ranks, residuals included; refused, or without residuals, by more. A
    state of LocalSGD is refused where a checkpoint has mixed ranks up."""
    whole = trained(tmp_path, "ddp/checkpoints.py", "whole")
    assert len(whole) == RANKS * 3 and whole == trained(tmp_path, "ddp/checkpoints.py", "rest")
    assert len(trained(tmp_path, "ddp/checkpoints.py", "more", 3)) == 3
