"""A monitor in training: what its records tell is what was sent, and nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path

import horovod.torch as hvd
import pytest
import torch
from training import distributed, flat_parameters, make_model, train

from hvd_adaptive import ALQ, Monitor, instances

STEPS, LARGEST_GROUP = 5, 20_000


def records(folder: Path) -> dict[str, list[dict]]:
    """Of the only file, by kind."""
    (path,) = folder.iterdir()
    found: dict[str, list[dict]] = {}
    for record in map(json.loads, path.read_text().splitlines()):
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
def test_records_agree_with_the_report(tmp_path, exchange):
    folder = tmp_path / str(hvd.rank())
    with Monitor(folder, every=2) as monitor:
        model, compressor, reports = trained(monitor, exchange=exchange)
    if hvd.rank():
        assert not folder.exists()
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
