"""What the soak calls a fault, on made-up logs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[1] / "soak/soak.py"
spec = importlib.util.spec_from_file_location("soak", PATH)
soak = importlib.util.module_from_spec(spec)
spec.loader.exec_module(soak)


def told(pid: int, seconds: int, **figures) -> list[dict]:
    """A worker's lines, every 10 s; figures are functions of the time."""
    entries = []
    for time in range(0, seconds, 10):
        entry = {
            "time": float(time),
            "pid": pid,
            "host": "h",
            "batch": time,
            "equal": True,
            "rss": 0,
            "threads": 9,
            "files": 9,
            "loss": 3 - time / 1000,
            "event": "step",
            "rank": 0,
        }
        entries.append(entry | {name: of(time) for name, of in figures.items()})
    return entries


def test_a_quiet_log_has_none():
    grown_at_first = told(2, 400, rss=lambda t: min(t, 50) * 2**24)
    assert soak.faults_of(told(1, 400) + grown_at_first) == []
    assert soak.growth_of(told(1, 400)) == [0.0] and soak.growth_of(told(1, 100)) == []


@pytest.mark.parametrize(
    ("figures", "fault"),
    [
        ({"equal": lambda t: t != 70}, "parameters differ at step 70"),
        ({"rss": lambda t: t * 2**20}, "rss grew"),
        ({"threads": lambda t: t // 20}, "threads grew"),
        ({"files": lambda t: t // 10}, "files grew"),
        ({"loss": lambda t: 2 + t / 1000}, "the loss did not fall"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_each_fault_is_found(figures, fault):
    (found,) = soak.faults_of(told(1, 400, **figures))
    assert fault in found


def test_workers_that_lived_shortly_are_not_asked():
    assert soak.faults_of(told(1, 120, rss=lambda t: t * 2**24)) == []


def test_only_what_nobody_uses_is_left_behind():
    assert soak.left_behind({"surely-nobody-has-this"}) == ["surely-nobody-has-this"]
