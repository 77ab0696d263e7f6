"""Elastic Horovod with a script of which only the line of the compression is changed."""

from __future__ import annotations

import sys

import pytest
from elastic_launch import SECONDS, Elastic, lines
from launch import ROOT, run

# Of 8 bits under L-infinity; without the others' part it would be above 0.5.
TOLERANCE = 0.05


@pytest.mark.parallel
@pytest.mark.timeout(SECONDS + 20)
@pytest.mark.parametrize("ending", ["grown", "killed"])
def test_a_newcomer_takes_the_first_ranks_tables(ending, tmp_path, monkeypatch):
    """And, where a worker is killed, survivors whose steps differ go on alike."""
    monkeypatch.setenv("HOROVOD_GLOO_TIMEOUT_SECONDS", "40")
    script = tmp_path / "discover.sh"
    script.write_text(f"#!/bin/sh\ncat {tmp_path}/hosts\n")
    script.chmod(0o755)
    (tmp_path / "hosts").write_text("localhost:1\n127.0.0.1:1\n")
    program = str(ROOT / "tests/parallel/ranks/elastic_plain.py")
    command = [sys.executable, program, str(tmp_path), ending]
    done = run(Elastic(2, str(script)), command, SECONDS)
    assert done.returncode == 0, done.stdout
    assert "Traceback" not in done.stdout, done.stdout
    assert "go on from the first rank's step" in done.stdout
    logs = {path.stem: lines(path) for path in tmp_path.glob("*.log")}
    first, second, added = (logs[name] for name in ("localhost", "127.0.0.1", "127.1"))
    sizes = [2, 3, 2] if ending == "killed" else [2, 3]
    found = [entry["size"] for entry in first]
    assert [s for s, before in zip(found, [0, *found], strict=False) if s != before] == sizes
    for entry in [*first, *second, *added]:
        assert entry["error"] < TOLERANCE, entry
    for other in (second, added):
        for entry in other:
            twins = [e for e in first if (e["batch"], e["size"]) == (entry["batch"], entry["size"])]
            same = ("hash", "step", "version", "table")
            assert any(all(t[n] == entry[n] for n in same) for t in twins), (entry, twins)
    begin = next(entry for entry in first if entry["batch"] == added[0]["batch"])
    assert added[0]["version"] == begin["version"] >= 2 and added[0]["step"] > 1
