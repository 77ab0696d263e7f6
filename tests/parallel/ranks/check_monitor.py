"""A monitor in training: what its records tell is what was sent, and nothing else changes."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import horovod.torch as hvd
import pytest
import torch
from training import distributed, flat_parameters, make_model, train

from hvd_adaptive import ALQ, Monitor, instances

STEPS, LARGEST_GROUP = 5, 20_000


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


def trained(monitor, **keywords):
    """A model, its compressor and the report of each step."""
    instances.start_over()
    keywords = {"bucket_size": 128, "fusion_bytes": 4 * LARGEST_GROUP} | keywords
    model, reports = make_model(), []
    compressor = ALQ(bits=3, monitor=monitor, update_steps=[0, 3], **keywords)
    optimizer = distributed(model, compressor)
    for _ in range(STEPS):
        train(model, optimizer, 1)
        reports.append(compressor.report())
    return model, compressor, reports


@pytest.mark.parametrize("exchange", ["allgather", "scatter_reduce"])
def test_records_agree_with_the_report(folder, exchange):
    with Monitor(folder, every=2) as monitor:
        model, compressor, reports = trained(monitor, exchange=exchange)
    if hvd.rank():
        assert not list(folder.iterdir())
    else:
        check_records(records(folder), model, compressor, reports, exchange)
    # The same without one, to the bit, and with one that is not on all ranks.
    alone = Monitor(folder / "alone") if hvd.rank() == 0 else None
    for other in (None, alone):
        again, _, _ = trained(other, exchange=exchange)
        assert torch.equal(flat_parameters(again), flat_parameters(model))


def check_records(found, model, compressor, reports, exchange) -> None:
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
    for name in ("relative_error", "peak_bytes"):
        assert found["step"][-1][name] == reports[-1][name]


def test_tensorboards_files_hold_what_the_lines_tell(folder):
    board = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(folder / "board") if hvd.rank() == 0 else None
    with Monitor(folder / "lines", every=2, tensorboard=writer) as monitor:
        trained(monitor)
    if writer is None:
        return
    writer.close()
    read, lines = board.EventAccumulator(str(folder / "board")), records(folder / "lines")
    read.Reload()

    def check(tag: str, told: list[tuple[int, float]]) -> None:
        """TensorBoard keeps float32."""
        narrow = [(step, torch.tensor(v, dtype=torch.float32).item()) for step, v in told]
        assert told and [(e.step, e.value) for e in read.Scalars(f"gradients/{tag}")] == narrow, tag

    for name in ("wire_bytes", "bits_per_coordinate", "relative_error", "step_s", "table_version"):
        check(name, [(r["step"], r[name]) for r in lines["step"] if r[name] is not None])
    for group in range(len(lines["start"][0]["groups"])):
        told = [(r["step"], r["groups"][group]["payload_bytes"]) for r in lines["step"]]
        check(f"group {group}/payload_bytes", told)
    for place in range(7):
        told = [(t["step"], t["levels"][place]) for t in lines["table"]]
        check(f"levels/{place:03d}", told)
