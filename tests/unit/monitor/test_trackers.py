"""Sinks of a user's, and those for MLflow and Weights & Biases, without a network."""

from __future__ import annotations

import math
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvd_adaptive import Monitor
from hvd_adaptive.monitor import StepMeter
from hvd_adaptive.monitor.trackers import MLflow, WandB


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


class Codec:
    """As much of a compressor as a monitor sees."""

    def __init__(self) -> None:
        self.meter, self.table_version, self.parts = StepMeter(), 0, {"": self}
        self.meter.detailed = True

    def steps(self, monitor, count):
        groups = [{"group": 0, "buckets": 10, "coordinates": 3}]
        facts = {"scheme": "S()", "rank": 0, "ranks": 4, "exchange": "allgather", "groups": groups}
        monitor.begin(self, facts)
        for number in range(count):
            self.meter.add("coordinates", 3, 0)
            self.meter.finish()
            monitor.step(self, number)


def test_every_record_reaches_every_sink(tmp_path):
    first, second = Kept(), Kept()
    with Monitor(tmp_path, every=2, sinks=[first, second]) as monitor:
        Codec().steps(monitor, 4)
    assert [r["kind"] for r in first.records] == ["start", "step", "step"]
    assert first.records == second.records and first.closed == second.closed == 1
    assert first.records[1]["step"] == 1 and first.records[1]["coordinates"] == 3
    assert list(tmp_path.glob("*.jsonl"))


def test_a_sink_that_fails_ends_no_training(caplog):
    broken, kept = Kept(fails=True), Kept()
    with Monitor(every=1, sinks=[broken, kept]) as monitor:
        Codec().steps(monitor, 3)
    assert len(kept.records) == 4 and broken.closed == 1
    assert [m for m in caplog.messages if "the tracker's server is away" in m] == [
        "monitor: writing stopped: the tracker's server is away"
    ]


def test_a_copy_of_a_monitor_has_no_sinks():
    copied = pickle.loads(pickle.dumps(Monitor(every=1, sinks=[Kept()])))
    Codec().steps(copied, 2)
    assert copied._own == []


def records():
    step = {
        "kind": "step",
        "compressor": 0,
        "step": 9,
        "wire_bytes": 1500.0,
        "payload_bytes": 1500.0,
        "ratio": 10.5,
        "bits_per_coordinate": 3.05,
        "relative_error": None,
        "encode_s": 0.001,
        "exchange_s": 0.002,
        "decode_s": 0.001,
        "step_s": math.nan,
        "peak_bytes": 4000,
        "non_finite": 0,
        "table_version": 1,
        "groups": [],
    }
    start = {"kind": "start", "compressor": 0, "scheme": "ALQ(bits=3)", "ranks": 4, "groups": []}
    return start, step, step | {"compressor": 1, "step": 19}


class Run:
    """As wandb.init returns it."""

    def __init__(self) -> None:
        self.metrics, self.logged, self.config = {}, [], self
        self.settings = {}

    def define_metric(self, name, step_metric=None):
        self.metrics[name] = step_metric

    def update(self, settings, allow_val_change=False):
        assert allow_val_change
        self.settings |= settings

    def log(self, figures):
        self.logged.append(figures)


def test_weights_and_biases():
    run = Run()
    sink = WandB(run, "g")
    for record in records():
        sink.write(record)
    sink.flush()
    sink.close()
    assert run.metrics == {"g/step": None, "g/*": "g/step"}
    assert run.settings == {"g/scheme": "ALQ(bits=3)", "g/ranks": 4}
    first, second = run.logged
    assert first["g/step"] == 9 and first["g/ratio"] == 10.5 and first["g/peak_bytes"] == 4000.0
    assert "g/relative_error" not in first and "g/step_s" not in first  # unknown, not finite
    assert second["g/1/wire_bytes"] == 1500.0 and second["g/step"] == 19


def test_mlflow(monkeypatch):
    told = []
    module = SimpleNamespace(
        set_tags=lambda tags: told.append(("tags", tags)),
        log_metrics=lambda figures, step, run_id: told.append((run_id, step, figures)),
        MlflowClient=lambda: SimpleNamespace(set_tag=lambda *tag: told.append(tag)),
    )
    monkeypatch.setitem(sys.modules, "mlflow", module)
    start, step, _ = records()
    for record in (start, step):
        MLflow().write(record)
    assert told[0] == ("tags", {"gradients/scheme": "ALQ(bits=3)", "gradients/ranks": "4"})
    assert told[1][:2] == (None, 9) and told[1][2]["gradients/ratio"] == 10.5
    MLflow(run_id="r").write(start)
    assert ("r", "gradients/scheme", "ALQ(bits=3)") in told


def test_a_real_run_of_wandb_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=tmp_path, project="p") as run:
        sink = WandB(run)
        for record in records():
            sink.write(record)
        assert run.config["gradients/ranks"] == 4 and run.summary["gradients/ratio"] == 10.5
    assert list(Path(tmp_path).rglob("*.wandb"))


def test_a_real_run_of_mlflow_in_a_folder(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with mlflow.start_run() as run:
        for record in records():
            MLflow().write(record)
    kept = mlflow.MlflowClient().get_run(run.info.run_id).data
    assert kept.metrics["gradients/ratio"] == 10.5
    assert kept.tags["gradients/scheme"] == "ALQ(bits=3)"
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "gradients/1/wire_bytes")
    assert [(m.step, m.value) for m in history] == [(19, 1500.0)]


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        ("mlflow", "sinks='mlflow': must be a collection of sinks"),
        (MLflow(), "must be a collection of sinks"),
        ([print], r"must have write\(\), flush\(\), close\(\)"),
        ([MLflow], "must have an instance, not a class"),
    ],
)
def test_wrong_sinks(sinks, message):
    with pytest.raises(ValueError, match=message):
        Monitor(sinks=sinks)
