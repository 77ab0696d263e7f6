"""A monitor in training: what its records tell is what was sent, and nothing else changes."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import horovod.torch as hvd
import pytest
import torch
from conftest import make_model, train
from rank_optimizers import distributed, drain
from stock_seconds import *  # noqa: F403

from hvd_adaptive import ALQ, QSGD, Monitor, RankMismatchError, instances

STEPS, BUCKET = 5, 128
LARGEST_GROUP = 20_000


@pytest.fixture
def folder():
    """Of this rank's own."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def records(folder: Path) -> dict[str, list[dict]]:
    """Of the only file, by kind."""
    (path,) = folder.iterdir()
    found: dict[str, list[dict]] = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        found.setdefault(record["kind"], []).append(record)
    return found


@pytest.mark.parametrize("exchange", ["allgather", "scatter_reduce"])
def test_records_agree_with_the_report(folder, exchange):
    model, reports = make_model(), []
    keywords = {"bucket_size": BUCKET, "fusion_bytes": 4 * LARGEST_GROUP, "exchange": exchange}
    with Monitor(folder, every=2) as monitor:
        compressor = ALQ(bits=3, monitor=monitor, update_steps=[0, 3], **keywords)
        optimizer = distributed(model, compressor)
        for _ in range(STEPS):
            train(model, optimizer, 1)
            reports.append(compressor.report())
    if hvd.rank():
        assert not list(folder.iterdir())
    else:
        found = records(folder)
        (start,) = found["start"]
        assert (start["ranks"], start["rank"], start["first_step"]) == (hvd.size(), 0, 0)
        assert len(start["groups"]) > 1
        assert {g["exchange"] for g in start["groups"]} == {exchange}
        sizes = {n: p.numel() for n, p in model.named_parameters()}
        told = dict.fromkeys(sizes, 0)
        for group in start["groups"]:
            assert sum(q for _, q, _ in group["members"]) == group["quantized"]
            for name, quantized, full in group["members"]:
                told[name] += quantized + full
        assert told == sizes
        assert [(t["step"], t["version"]) for t in found["table"]] == [(0, 1), (3, 2)]
        assert found["table"][-1]["levels"] == compressor.levels.tolist()
        assert [(r["step"], r["steps"]) for r in found["step"]] == [(1, 2), (3, 2), (4, 1)]
        for record, of_steps in zip(
            found["step"], (reports[:2], reports[2:4], reports[4:]), strict=True
        ):
            for name in ("payload_bytes", "wire_bytes", "coordinates", "encode_s", "decode_s"):
                mean = sum(report[name] for report in of_steps) / len(of_steps)
                assert record[name] == pytest.approx(mean, rel=1e-9)
                of_groups = sum(group[name] for group in record["groups"])
                assert of_groups == pytest.approx(mean, rel=1e-9)
            assert record["flight_s"] > 0 and record["non_finite"] == 0
        assert found["step"][-1]["relative_error"] == reports[-1]["relative_error"]
        assert found["step"][-1]["peak_bytes"] == reports[-1]["peak_bytes"]
    # The same without one, to the bit.
    instances.start_over()
    other = make_model()
    train(other, distributed(other, ALQ(bits=3, update_steps=[0, 3], **keywords)), STEPS)
    again = make_model()
    alone = Monitor(folder / "alone") if hvd.rank() == 0 else None  # not on all ranks
    instances.start_over()
    watched = ALQ(bits=3, update_steps=[0, 3], monitor=alone, **keywords)
    train(again, distributed(again, watched), STEPS)
    for a, b in zip(other.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def single(told: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Steps and figures as TensorBoard keeps them, in float32."""
    return [(step, torch.tensor(value, dtype=torch.float32).item()) for step, value in told]


def test_tensorboards_files_hold_what_the_lines_tell(folder):
    board = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(folder / "board") if hvd.rank() == 0 else None
    model = make_model()
    with Monitor(folder / "lines", every=2, tensorboard=writer) as monitor:
        compressor = ALQ(bits=3, bucket_size=BUCKET, update_steps=[0, 3], monitor=monitor)
        train(model, distributed(model, compressor), STEPS)
    if writer is None:
        return
    writer.close()
    read, lines = board.EventAccumulator(str(folder / "board")), records(folder / "lines")
    read.Reload()
    scalars = {
        tag: [(event.step, event.value) for event in read.Scalars(tag)]
        for tag in read.Tags()["scalars"]
    }
    for name in ("wire_bytes", "bits_per_coordinate", "relative_error", "step_s", "table_version"):
        told = [(r["step"], r[name]) for r in lines["step"] if r[name] is not None]
        assert told and scalars[f"gradients/{name}"] == single(told), name
    for group in range(len(lines["start"][0]["groups"])):
        told = [(r["step"], r["groups"][group]["payload_bytes"]) for r in lines["step"]]
        assert scalars[f"gradients/group {group}/payload_bytes"] == single(told)
    for place in range(7):
        told = [(t["step"], t["levels"][place]) for t in lines["table"]]
        assert len(told) == 2 and scalars[f"gradients/levels/{place:03d}"] == single(told)


@pytest.mark.parametrize("exchange", ["allgather", "scatter_reduce"])
def test_non_finite_buckets_are_counted(folder, exchange):
    """One rank has a NaN in a column of its input, so in one of the five buckets of each row."""
    model = torch.nn.Linear(5 * BUCKET, 10, bias=False)
    with Monitor(folder, every=1, ranks="all") as monitor:
        compressor = QSGD(bits=4, bucket_size=BUCKET, exchange=exchange, monitor=monitor)
        optimizer = distributed(model, compressor)
        for step in range(3):
            inputs = torch.ones(3, 5 * BUCKET)
            if step == 1 and hvd.rank() == hvd.size() - 1:
                inputs[0, BUCKET + 7] = torch.nan
            optimizer.zero_grad()
            model(inputs).sum().backward()
            optimizer.step()
    assert [r["non_finite"] for r in records(folder)["step"]] == [0, 10, 0]


def test_all_ranks_compare_or_none():
    monitor = Monitor(compare=True) if hvd.rank() else Monitor()
    model = make_model()
    optimizer = distributed(model, QSGD(bits=4, seed=77, monitor=monitor))
    with pytest.raises(RankMismatchError, match=r"Monitor\(compare=\) is False on rank 0, True on"):
        train(model, optimizer, 1)
    drain(optimizer)
