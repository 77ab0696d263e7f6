"""Distributed checkpoints of DDP with error feedback, which other processes load."""

from __future__ import annotations

import re
from pathlib import Path

import forked
import pytest
from launch import ROOT

SECONDS = 120


def trained(folder: Path, part: str, ranks: int = 2) -> dict[str, str]:
    """Hashes of parameters and residuals by rank."""
    program = ROOT / "tests/parallel/ddp/checkpoints.py"
    (folder / part).mkdir()
    told = forked.run(ranks, program, [str(folder), part], {}, folder / part, SECONDS)
    found = re.findall(r"rank=(\d) step=7 hash=([0-9a-f]{64})", told)
    assert len(found) == ranks, told
    return dict(found)


@pytest.mark.parallel
@pytest.mark.timeout(3 * SECONDS + 20)
def test_a_run_goes_on_from_a_distributed_checkpoint(tmp_path):
    """Bit for bit with as many ranks, residuals included; refused, or without residuals, by more. A
    compressor's own state is refused where a checkpoint has mixed ranks up."""
    assert trained(tmp_path, "whole") == trained(tmp_path, "rest")
    trained(tmp_path, "more", 3)
