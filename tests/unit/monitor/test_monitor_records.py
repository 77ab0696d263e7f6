"""What a monitor writes, to a user's sinks, too, and what it does when it cannot write."""

from __future__ import annotations

import json
import logging
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from watched import FACTS, GROUPS, Codec, begun

from hvd_adaptive import Monitor


class Writer:
    """As torch.utils.tensorboard.SummaryWriter is called."""

    def __init__(self) -> None:
        self.scalars: dict[str, list[tuple[int, float]]] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.scalars.setdefault(tag, []).append((global_step, scalar_value))


def records(folder: Path, kind: str) -> list[dict]:
    lines = [
        line for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().split("\n")
    ]
    return [r for r in map(json.loads, filter(None, lines)) if r["kind"] == kind]


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


def test_records_are_means_over_the_steps_since_the_last(tmp_path):
    monitor = Monitor(tmp_path, every=3)
    codec = begun(monitor)
    for step in range(7):
        codec.step(
            monitor,
            step,
            payload_bytes=(10 * step, 2.0),
            uncompressed_bytes=(80 * step, 8.0),
            squared_error=(1.0, step),
            squared_norm=(2.0, 6.0),
            encode_s=(0.5, 0.25),
        )
    assert [r["step"] for r in records(tmp_path, "step")] == []  # buffered
    monitor.close()
    first, second, last = records(tmp_path, "step")
    assert [(r["step"], r["steps"]) for r in (first, second, last)] == [(2, 3), (5, 3), (6, 1)]
    assert first["payload_bytes"] == (0 + 10 + 20) / 3 + 2
    assert second["payload_bytes"] == (30 + 40 + 50) / 3 + 2 and last["payload_bytes"] == 62
    assert first["ratio"] == (80 * 3 + 24) / (30 + 6)
    assert second["relative_error"] == (3 + 3 + 4 + 5) / 24
    assert [g["relative_error"] for g in last["groups"]] == [0.5, 1.0]
    assert [g["encode_s"] for g in second["groups"]] == [0.5, 0.25] and second["encode_s"] == 0.75
    assert first["step_s"] > 0 and 0 < first["monitor_s"] < 5
    (start,) = records(tmp_path, "start")
    assert start["groups"] == GROUPS and start["compressor"] == 0


def test_what_is_not_a_number_is_null(tmp_path):
    monitor = Monitor(tmp_path, every=1)
    begun(monitor).step(monitor, 0, coordinates=(0, 0))
    monitor.close()
    (record,) = records(tmp_path, "step")
    assert record["relative_error"] is None and record["ratio"] is None and record["step_s"] is None


def test_tables_are_written_when_they_change(tmp_path):
    monitor = Monitor(tmp_path)
    codec = begun(monitor)
    for step, version in enumerate((1, 1, 2, 2)):
        codec.table_version = version
        codec.step(monitor, step, coordinates=(1, 1))
    monitor.close()
    tables = records(tmp_path, "table")
    assert [(t["step"], t["version"], t["part"]) for t in tables] == [(0, 1, ""), (2, 2, "")]
    assert tables[0]["levels"] == [-1.0, 0.25, 1.0]
    assert records(tmp_path, "step")[-1]["table_version"] == 2


def test_tensorboard_gets_scalars_of_steps_groups_and_tables(tmp_path):
    writer = Writer()
    monitor = Monitor(tensorboard=writer, every=2, name="net")
    codec, other = begun(monitor), begun(monitor)
    for step in range(4):
        codec.step(monitor, step, wire_bytes=(step, 1.0), payload_bytes=(step, 1.0))
        other.step(monitor, step, wire_bytes=(7.0, 0.0))
    assert writer.scalars["net/wire_bytes"] == [(1, 1.5), (3, 3.5)]
    assert writer.scalars["net/1/wire_bytes"] == [(1, 7.0), (3, 7.0)]
    assert writer.scalars["net/group 0/payload_bytes"] == [(1, 0.5), (3, 2.5)]
    assert writer.scalars["net/levels/001"] == [(0, 0.25)]
    assert "net/relative_error" not in writer.scalars  # never a NaN
    assert list(tmp_path.iterdir()) == []


def test_lines_of_the_log(caplog):
    monitor = Monitor(log=True, every=2)
    with caplog.at_level(logging.INFO, "hvd_adaptive"):
        codec = begun(monitor)
        for step in range(2):
            codec.step(
                monitor,
                step,
                payload_bytes=(1e6, 1e6),
                uncompressed_bytes=(8e6, 8e6),
                wire_bytes=(3e6, 0),
                squared_error=(1, 0),
                squared_norm=(4, 4),
            )
    start, step = caplog.messages
    assert start == "monitoring S() over 4 ranks: 7 coordinates in 2 groups"
    assert step.startswith(
        "step 1: 3.000 MB sent, payloads 8.0 times smaller than gradients, "
        "relative error 0.125, encode 0.0, wait"
    )


def test_every_process_monitor_and_compressor_is_told_apart(tmp_path):
    one, two = Monitor(tmp_path), Monitor(tmp_path)
    for monitor in (one, two):
        for codec in (begun(monitor), begun(monitor)):
            codec.step(monitor, 0, coordinates=(1, 1))
        monitor.close()
    assert len(list(tmp_path.glob("gradients-rank0-*.jsonl"))) == 2
    assert sorted(r["compressor"] for r in records(tmp_path, "step")) == [0, 0, 1, 1]


def test_a_file_is_continued_and_opened_again_after_close(tmp_path):
    path = tmp_path / "deep" / "run.jsonl"
    for _ in range(2):
        monitor = Monitor(path, every=1)
        codec = begun(monitor)
        codec.step(monitor, 0, coordinates=(1, 1))
        monitor.close()
        codec.step(monitor, 1, coordinates=(1, 1))
        monitor.flush()
    assert [r["step"] for r in records(tmp_path / "deep", "step")] == [0, 1, 0, 1]


def test_a_new_layout_ends_the_means_of_the_old(tmp_path):
    with Monitor(tmp_path, every=100) as monitor:
        codec = begun(monitor)
        codec.step(monitor, 0, payload_bytes=(1.0, 1.0))
        monitor.begin(codec, FACTS | {"ranks": 3})
        codec.step(monitor, 1, payload_bytes=(5.0, 5.0))
    assert [r["payload_bytes"] for r in records(tmp_path, "step")] == [2.0, 10.0]
    assert [r["ranks"] for r in records(tmp_path, "start")] == [4, 3]
    assert len(records(tmp_path, "table")) == 2  # settings may have changed it


@pytest.mark.parametrize(
    ("place", "told"), [("file/folder", "cannot be written"), ("full.jsonl", "writing stopped")]
)
def test_what_cannot_be_written_is_told_once_and_training_goes_on(place, told, tmp_path, caplog):
    """No folder, and a full disk."""
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "full.jsonl").symlink_to("/dev/full")
    monitor = Monitor(tmp_path / place, every=1)
    codec = begun(monitor)
    for step in range(3):
        codec.step(monitor, step, coordinates=(1, 1))
    monitor.close()
    assert len(caplog.messages) == 1 and told in caplog.messages[0]


def test_written_at_exit(tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from watched import *\n"
        "monitor = Monitor(sys.argv[1])\n"
        "codec = begun(monitor)\n"
        "codec.step(monitor, 0, coordinates=(1, 1))\n"
    )
    here = str(Path(__file__).parent)
    subprocess.run([sys.executable, "-c", code, str(tmp_path), here], check=True, timeout=120)
    assert [r["steps"] for r in records(tmp_path, "step")] == [1]


def test_buckets_that_are_not_finite(tmp_path):
    monitor = Monitor(tmp_path, every=2)
    codec = begun(monitor)
    averaged = torch.ones(70)
    for step, bad in enumerate(((), (0, 3))):
        for bucket in bad:
            averaged[10 * bucket : 10 * bucket + 10] = torch.nan
        codec.meter.look(averaged, 10, 0)
        codec.meter.look(averaged[:0], 10, 1)
        codec.step(monitor, step, coordinates=(70, 0))
    monitor.close()
    (record,) = records(tmp_path, "step")
    assert record["non_finite"] == 2 and [g["non_finite"] for g in record["groups"]] == [2, 0]


@pytest.mark.parametrize("bad", [0, 9, 10, 13, 73])
def test_buckets_that_leave_zeros_out_are_checked_everywhere(bad):
    codec = Codec(detailed=False)
    averaged = torch.ones(74)
    averaged[bad] = torch.inf
    codec.meter.look(averaged, 10, 0, without_zeros=True)
    codec.meter.finish()
    assert codec.meter.report()["non_finite"] == 1
    assert codec.meter.last.buckets == 8


def test_groups_have_figures_only_where_there_is_a_monitor():
    codec = Codec(detailed=False)
    codec.meter.add(0, payload_bytes=5)
    codec.meter.look(torch.full((20,), torch.nan), 10, 0)
    codec.meter.finish()
    assert codec.meter.report()["payload_bytes"] == 5
    assert codec.meter.last_groups == {} and codec.meter.report()["non_finite"] == 2


def test_a_pickled_monitor_has_neither_files_nor_sinks(tmp_path):
    keywords = {"every": 1, "tensorboard": Writer(), "sinks": [Kept()], "name": "net"}
    monitor = Monitor(tmp_path, ranks=(0, 3), **keywords)
    steps(monitor, 1)
    again = pickle.loads(pickle.dumps(monitor))
    steps(again, 2)
    for one in (monitor, again):
        one.close()
    assert [again.watches(rank) for rank in (0, 1, 3)] == [True, False, True]
    assert not Monitor().watches(1) and Monitor(ranks="all").watches(99)
    assert len(list(tmp_path.glob("net-rank0-*"))) == 2
    assert again._own == [] and len(keywords["sinks"][0].records) == 3


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        *(
            ({"folder": folder}, f"folder={folder!r}: must be a path that is not empty, or None")
            for folder in ("", 3, True, b"runs", "a\0b", ["runs"])
        ),
        ({"every": 0}, "every=0: must be an integer >= 1"),
        ({"ranks": "some"}, "ranks='some': must be a collection of ranks, or 'all'"),
        ({"ranks": (-1,)}, "ranks: rank=-1"),
        ({"name": "a/b"}, "name='a/b'"),
        ({"tensorboard": 3}, "tensorboard=3: must be a torch.utils.tensorboard.SummaryWriter"),
        ({"error_limit": -1}, "error_limit=-1: must be a number of 0 or more, or None"),
        ({"non_finite_limit": float("nan")}, "non_finite_limit=nan"),
        ({"log": "no"}, "log='no': must be True or False"),
        ({"warn_slow": 0}, "warn_slow=0: must be True or False"),
        ({"compare": 1}, "compare=1: must be True or False"),
        ({"sinks": "mlflow"}, "sinks='mlflow': must be a collection of sinks"),
        ({"sinks": Kept()}, "must be a collection of sinks"),
        ({"sinks": [print]}, "must have write(), flush(), close()"),
        ({"sinks": [Kept]}, "must have an instance, not a class"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_wrong_arguments(keywords, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Monitor(**keywords)


def test_every_record_reaches_every_sink_and_one_that_fails_ends_no_training(tmp_path, caplog):
    broken, first, second = Kept(fails=True), Kept(), Kept()
    with Monitor(tmp_path, every=2, sinks=[broken, first, second]) as monitor:
        steps(monitor, 4)
    assert [r["kind"] for r in first.records] == ["start", "table", "step", "step"]
    assert first.records == second.records
    assert broken.closed == first.closed == second.closed == 1
    assert first.records[2]["step"] == 1 and first.records[2]["coordinates"] == 3
    assert list(tmp_path.glob("*.jsonl"))
    assert [m for m in caplog.messages if "the tracker's server is away" in m] == [
        "monitor: writing stopped: the tracker's server is away"
    ]
