"""Elastic Horovod: a worker is added and one is killed; tables go on, and parameters stay equal."""

from __future__ import annotations

import sys

import pytest
from elastic_launch import SECONDS, Elastic, lines
from launch import ROOT, run


@pytest.mark.parallel
@pytest.mark.timeout(SECONDS + 20)
def test_workers_come_and_go(tmp_path, monkeypatch):
    # A survivor may wait so long for the one that was killed, and all do for one that starts.
    monkeypatch.setenv("HOROVOD_GLOO_TIMEOUT_SECONDS", "40")
    script = tmp_path / "discover.sh"
    script.write_text(f"#!/bin/sh\ncat {tmp_path}/hosts\n")
    script.chmod(0o755)
    (tmp_path / "hosts").write_text("localhost:1\n127.0.0.1:1\n")
    program = str(ROOT / "tests/parallel/ranks/elastic.py")
    done = run(Elastic(2, str(script)), [sys.executable, program, str(tmp_path)], SECONDS)
    assert done.returncode == 0, done.stdout
    assert "Traceback" not in done.stdout, done.stdout
    logs = {path.stem: lines(path) for path in tmp_path.glob("*.log")}
    first, second, added = (logs[name] for name in ("localhost", "127.0.0.1", "127.1"))

    sizes = [entry["size"] for entry in first]
    assert [size for size, before in zip(sizes, [0, *sizes], strict=False) if size != before] == [
        2,
        3,
        2,
    ]
    assert added[0]["size"] == 3 and {entry["size"] for entry in second} == {2, 3}
    # Every step that several workers finished left them alike; one that was repeated counts twice.
    for other in (second, added):
        for entry in other:
            twins = [e for e in first if (e["batch"], e["size"]) == (entry["batch"], entry["size"])]
            assert any(alike(twin, entry) for twin in twins), (entry, twins)
    # The newcomer took the tables that were there.
    begin = next(entry for entry in first if entry["batch"] == added[0]["batch"])
    assert added[0]["versions"] == begin["versions"] and min(begin["versions"]) >= 2
    assert added[0]["bits"] == 4
    # Survivors of a crash go on from the last commit: at most two steps are done again.
    batches = [entry["batch"] for entry in first]
    assert batches[-1] == max(batches) and len(batches) - len(set(batches)) <= 2
    assert first[-1]["steps"] == [batches[-1]] * 2
    for losses in zip(*(entry["losses"] for entry in first), strict=True):
        assert sum(losses[-4:]) < 0.95 * sum(losses[:4])


def alike(one: dict, other: dict) -> bool:
    return all(one[name] == other[name] for name in ("hash", "steps", "versions", "tables", "bits"))
