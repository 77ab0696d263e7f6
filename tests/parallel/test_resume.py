"""A run that is stopped and goes on in new processes equals the one that was not, bit for bit."""

from __future__ import annotations

import re
from pathlib import Path

import forked
import pytest
from launch import ROOT

SECONDS = 180
RANKS = 2


def trained(folder: Path, part: str) -> dict[tuple[str, str], str]:
    """Hashes of parameters and residuals by case and rank."""
    program = ROOT / "tests/parallel/ranks/resume.py"
    (folder / part).mkdir()
    told = forked.run(RANKS, program, [str(folder), part], {}, folder / part, SECONDS)
    found = re.findall(r"case=(\S+) rank=(\d) step=7 hash=([0-9a-f]{64})", told)
    assert len(found) == RANKS * 10, told
    return {(case, rank): digest for case, rank, digest in found}


@pytest.mark.parallel
@pytest.mark.timeout(2 * SECONDS + 20)
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path):
    """Level tables, code books, second stages, retries, rate control, residuals, warm-up, changed
    settings, schemes without a table."""
    assert trained(tmp_path, "whole") == trained(tmp_path, "rest")
