"""benchmarks/footprint.py: it counts the calls of this package, kernels left out."""

from __future__ import annotations

import re
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from script_runs import MPIRUN, run

from hvd_adaptive import ALQ
from hvd_adaptive.tools.output import whole

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
ROW = re.compile(r"^(.*\S)\s+(\d+)\s+(\d+)\s+([\d,]+)\s+([\d.]+)$", re.MULTILINE)


@pytest.fixture
def footprint(monkeypatch):
    pytest.importorskip("horovod.torch")
    import footprint

    yield footprint
    sys.modules.pop("footprint")


def test_calls_of_all_threads_are_counted(footprint, monkeypatch):
    monkeypatch.setattr(footprint, "counts", Counter())
    compressor, values = ALQ(bits=3), torch.ones(2048)
    monkeypatch.setattr(threading, "_profile_hook", None)
    threading.setprofile(footprint.count)
    thread = threading.Thread(target=lambda: [whole(2) for _ in range(7)])
    earlier = sys.getprofile()
    sys.setprofile(footprint.count)
    try:
        thread.start()
        thread.join()
        compressor.encode(values)
    finally:
        sys.setprofile(earlier)
    found = {(file, name): number for (file, _, name), number in footprint.counts.items()}
    assert found["tools/output.py", "whole"] == 7
    assert any(file.startswith("codec/") for file, _ in found)
    assert not any(file.startswith("kernels/") for file, _ in found)


@pytest.mark.parallel
@pytest.mark.thorough
def test_two_ranks_print_a_row_for_each_door(footprint, tmp_path):
    command = [*MPIRUN, sys.executable, str(BENCHMARKS / "footprint.py"), "--steps", "1", "--list"]
    done = run(command, tmp_path, 120)
    assert done.returncode == 0, done.stdout
    heads, *lists = re.split(r"\n\n", done.stdout)
    rows = {row[0]: row[1:] for row in ROW.findall(heads)}
    assert list(rows) == list(footprint.DOORS)
    for (door, row), listed in zip(rows.items(), lists, strict=True):
        name, *lines = listed.strip().splitlines()
        places = [line.split()[1].rpartition(":")[0] for line in lines]
        calls = sum(int(line.split()[0]) for line in lines)
        assert name == door and [len(set(places)), len(places)] == [int(row[0]), int(row[1])]
        assert calls == int(row[2].replace(",", "")) and float(row[3]) == round(calls / 12, 1)
        # Each gradient goes through a door and a codec.
        assert calls > 12 and {place.split("/")[0] for place in places} > {"codec", "hooks"}
