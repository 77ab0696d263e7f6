"""Records as a monitor writes them."""

from __future__ import annotations

import json
from pathlib import Path

FIGURES = {
    "coordinates": 3000.0,
    "uncompressed_bytes": 12_000.0,
    "payload_bytes": 1500.0,
    "wire_bytes": 4500.0,
    "encode_s": 0.001,
    "exchange_s": 0.004,
    "decode_s": 0.002,
    "flight_s": 0.005,
    "relative_error": 0.5,
}
MEMBERS = [["<b>.weight", 2400, 0], ["a.weight", 500, 0], ["a.bias", 0, 100]]


GROUP = {"group": 0, "part": "", "dtype": "float32", "coordinates": 3000, "quantized": 2900}
GROUP |= {"buckets": 3, "exchange": "allgather", "members": MEMBERS}
FACTS = {"scheme": "ALQ(bits=3, norm='l2')", "name": "n", "version": "1", "torch": "2", "host": "h"}
FACTS |= {"rank": 0, "ranks": 4, "first_step": 0, "exchange": "allgather"}


def start(time: float, **changes) -> dict:
    record = {"kind": "start", "compressor": 0, "time": time, "groups": [dict(GROUP)]}
    return record | FACTS | changes


def step(time: float, number: int, steps: int = 1, **changes) -> dict:
    whole = FIGURES | {"step_s": 0.05, "peak_bytes": 10 * number, "non_finite": 0}
    record = {"kind": "step", "compressor": 0, "time": time, "step": number, "steps": steps}
    groups = [{"group": 0, "non_finite": 0, **FIGURES, **changes}]
    return record | whole | {"table_version": 1, "monitor_s": 1e-5, "groups": groups} | changes


def table(time: float, number: int, version: int) -> dict:
    levels = [-1.0, -0.1 / (1 + version), 0.1 / (1 + version), 1.0]
    record = {"kind": "table", "compressor": 0, "time": time, "step": number}
    return record | {"part": "", "version": version, "levels": levels}


def write(path: Path, *records: dict | str) -> None:
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("\n".join(lines) + "\n")
