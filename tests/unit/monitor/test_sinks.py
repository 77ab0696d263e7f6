"""Sinks of a user's."""

from __future__ import annotations

import pickle

import pytest
from watched import begun

from hvd_adaptive import Monitor


class Kept:
    """A sink that keeps its records."""

    def __init__(self, fails: bool = False) -> None:
        self.records, self.flushed, self.closed, self.fails = [], 0, 0, fails

    def write(self, record):
        if self.fails:
            raise RuntimeError("the tracker's server is away")
        self.records.append(dict(record))

    def flush(self):
        self.flushed += 1

    def close(self):
        self.closed += 1


def steps(monitor: Monitor, count: int) -> None:
    codec = begun(monitor)
    for number in range(count):
        codec.step(monitor, number, coordinates=(3,))


def test_every_record_reaches_every_sink(tmp_path):
    first, second = Kept(), Kept()
    with Monitor(tmp_path, every=2, sinks=[first, second]) as monitor:
        steps(monitor, 4)
    assert [r["kind"] for r in first.records] == ["start", "table", "step", "step"]
    assert first.records == second.records and first.closed == second.closed == 1
    assert first.records[2]["step"] == 1 and first.records[2]["coordinates"] == 3
    assert list(tmp_path.glob("*.jsonl"))


def test_a_sink_that_fails_ends_no_training(caplog):
    broken, kept = Kept(fails=True), Kept()
    with Monitor(every=1, sinks=[broken, kept]) as monitor:
        steps(monitor, 3)
    assert len(kept.records) == 5 and broken.closed == 1
    assert [m for m in caplog.messages if "the tracker's server is away" in m] == [
        "monitor: writing stopped: the tracker's server is away"
    ]


def test_a_copy_of_a_monitor_has_no_sinks():
    copied = pickle.loads(pickle.dumps(Monitor(every=1, sinks=[Kept()])))
    steps(copied, 2)
    assert copied._own == []


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        ("mlflow", "sinks='mlflow': must be a collection of sinks"),
        (Kept(), "must be a collection of sinks"),
        ([print], r"must have write\(\), flush\(\), close\(\)"),
        ([Kept], "must have an instance, not a class"),
    ],
)
def test_wrong_sinks(sinks, message):
    with pytest.raises(ValueError, match=message):
        Monitor(sinks=sinks)
