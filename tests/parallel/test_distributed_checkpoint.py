"""Distributed checkpoints of DDP, average() and LocalSGD, which other processes load."""

from __future__ import annotations

import re
from pathlib import Path

import forked
import pytest
from launch import ROOT

SECONDS = 120


def trained(folder: Path, part: str, ranks: int = 2) -> set[tuple[str, ...]]:
    """(door, rank, hash of parameters and residuals)."""
    program = ROOT / "tests/parallel/ddp/checkpoints.py"
    (folder / part).mkdir()
    told = forked.run(ranks, program, [str(folder), part], {}, folder / part, SECONDS)
    return set(re.findall(r"(\w+) rank=(\d) hash=([0-9a-f]{64})", told))


@pytest.mark.parallel
@pytest.mark.timeout(3 * SECONDS + 20)
def test_a_run_goes_on_from_a_distributed_checkpoint(tmp_path):
    """Bit for bit with as many ranks, residuals included; refused, or without residuals, by more. A
    compressor's own state is refused where a checkpoint has mixed ranks up."""
    whole = trained(tmp_path, "whole")
    assert len(whole) == 6 and whole == trained(tmp_path, "rest")
    assert len(trained(tmp_path, "more", 3)) == 3
