"""Elastic Horovod: workers are added and killed; tables go on, and parameters stay equal."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest
from script_runs import BIN, ROOT, run

SECONDS = 240
# How long a survivor may wait for one that was killed, and all do for one that starts.
LIMIT = "HOROVOD_GLOO_TIMEOUT_SECONDS=40"
TWO_HOSTS = "localhost:1\n127.0.0.1:1\n"
pytestmark = [pytest.mark.parallel, pytest.mark.timeout(SECONDS + 20)]
# Of 8 bits under L-infinity; without the others' part it would be above 0.5.
TOLERANCE = 0.05


def logs_of(folder: Path, ending: str, hosts: str = TWO_HOSTS, most: int = 3):
    """Run elastic.py to its end by horovodrun, with hosts that change, which names of this machine
    stand in for; its output, and each host's lines, whose errors are small."""
    script = folder / "discover.sh"
    script.write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
    script.chmod(0o755)
    (folder / "hosts").write_text(hosts)
    path = str(ROOT / "tests/parallel/ranks/elastic.py")
    command = ["env", LIMIT, str(BIN / "horovodrun"), "--host-discovery-script", str(script)]
    command += ["-np", "2", "--min-np", "2", "--max-np", str(most), "--network-interface", "lo"]
    told = run([*command, sys.executable, path, str(folder), ending], ROOT, SECONDS)
    assert "Traceback" not in told, told
    logs = {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()]
        for path in folder.glob("*.log")
    }
    for entry in (entry for log in logs.values() for entry in log):
        assert entry["error"] < TOLERANCE, entry
    return told, logs


def sizes_of(log: list[dict]) -> list[int]:
    """The numbers of workers, one after the other."""
    return [size for size, _ in itertools.groupby(entry["size"] for entry in log)]


def assert_alike(first: list[dict], *others: list[dict], names=("hash",)) -> None:
    """Every turn that several workers finished left them alike; one that was repeated counts
    twice."""
    for entry in (entry for other in others for entry in other):
        twins = [e for e in first if (e["batch"], e["size"]) == (entry["batch"], entry["size"])]
        alike = [all(twin[name] == entry[name] for name in names) for twin in twins]
        assert any(alike), (entry, twins)


def test_workers_come_and_go(tmp_path):
    """One is added, and one is killed within its backward pass. The last compressor is no part of
    the state: a newcomer takes its tables from the first rank, and survivors go on alike."""
    told, logs = logs_of(tmp_path, "killed")
    assert "go on from the first rank's step" in told
    first, second, added = (logs[name] for name in ("localhost", "127.0.0.1", "127.1"))
    assert sizes_of(first) == [2, 3, 2]
    assert added[0]["size"] == 3 and {entry["size"] for entry in second} == {2, 3}
    assert_alike(first, second, added, names=("hash", "steps", "versions", "tables", "bits"))
    # The newcomer took the tables that were there.
    begin = next(entry for entry in first if entry["batch"] == added[0]["batch"])
    assert added[0]["versions"] == begin["versions"] and min(begin["versions"]) >= 2
    assert added[0]["bits"] == 4 and min(added[0]["steps"]) > 1
    # Survivors of a crash go on from the last commit: at most two steps are done again.
    batches = [entry["batch"] for entry in first]
    assert batches[-1] == max(batches) and len(batches) - len(set(batches)) <= 2
    assert first[-1]["steps"][:2] == [batches[-1]] * 2
    for losses in zip(*(entry["losses"] for entry in first), strict=True):
        assert sum(losses[-4:]) < 0.95 * sum(losses[:4])


@pytest.mark.thorough
def test_newcomers_go_on_when_all_first_workers_have_left(tmp_path):
    """A host of two is added, and the first host of two taken away: the first rank is then one that
    took its tables from a worker that is gone."""
    _, logs = logs_of(tmp_path, "left", hosts="localhost:2\n", most=4)
    first, second = logs["localhost"], logs["127.0.0.1"]
    assert {e["size"] for e in first} == {2, 4} and {e["size"] for e in second} == {4, 2}
    alone = [e for e in second if e["size"] == 2]
    assert min(e["batch"] for e in alone) > max(e["batch"] for e in first)
    by_step: dict[tuple[int, int], list[dict]] = {}
    for entry in [*first, *second]:
        by_step.setdefault((entry["batch"], entry["size"]), []).append(entry)
    for (_, size), entries in by_step.items():
        assert len(entries) >= size
        alike = {(e["hash"], *e["steps"], *e["versions"], *e["tables"]) for e in entries}
        assert len(alike) == 1
    # Tables and steps go on where those of the workers that have left stopped.
    last = max(first, key=lambda e: e["batch"])
    begin = min(alone, key=lambda e: e["batch"])
    assert begin["versions"][2] == last["versions"][2] == 3
    assert begin["tables"] == last["tables"] and begin["steps"] > last["steps"]


@pytest.mark.thorough
def test_local_sgd_continues_with_other_workers(tmp_path):
    """Rounds end with the mean of all workers, before and after one is added and one is killed."""
    _, logs = logs_of(tmp_path, "local")
    first, added = logs["localhost"], logs["127.1"]
    assert sizes_of(first) == [2, 3, 2]
    assert [entry["rounds"] for entry in first] == [entry["batch"] for entry in first]
    assert first[0]["version"] >= 1 and added[0]["version"] == first[-1]["version"] >= 2
    assert_alike(first, logs["127.0.0.1"], added)
