"""A monitor's comparison with stock exchanges, by each door (see tests/nets.py)."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from nets import Door, flat_parameters, make_net, train

from hvd_adaptive import QSGD, Monitor, instances

__all__ = ["test_stock_exchanges_are_measured_once"]
STEPS = 5


def test_stock_exchanges_are_measured_once(door: Door, rank: int) -> None:
    """The start record has them; the training's bits stay the same; ``set`` measures nothing."""
    ends = []
    with TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        for monitor in (Monitor(log, every=1, compare=True), None):
            instances.start_over()
            net, compressor = make_net(), QSGD(bits=4, bucket_size=128, monitor=monitor)
            training = door(net, compressor)
            train(training, rank, range(STEPS))
            compressor.set(bits=5)
            train(training, rank, range(STEPS, 2 * STEPS))
            ends.append(flat_parameters(net))
            if monitor is not None:
                monitor.close()
        assert torch.equal(*ends)
        if rank:
            return
        lines = [json.loads(line) for line in log.read_text().splitlines()]
    first, *others = (line["stock"] for line in lines if line["kind"] == "start")
    assert sorted(first) == ["float16", "float32"] and all(s > 0 for s in first.values())
    assert others and all(other == first for other in others)
    timed = [line for line in lines if line["kind"] == "step" and line["step_s"] is not None]
    assert len(timed) >= 2 * (STEPS - 1) - 1
    for record in timed:
        assert 0 < record["blocked_s"] < record["step_s"]
        assert 0 < record["arrival_s"] < record["step_s"]
