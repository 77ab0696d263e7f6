"""The step's figures, the memory that is held, and warnings when compression hurts: when they come,
and that they come once."""

from __future__ import annotations

import re

import pytest
import torch
from watched import begun

from hvd_adaptive import Monitor
from hvd_adaptive.monitor import StepMeter
from hvd_adaptive.monitor.alarms import FIRST, WINDOW


def test_peak_of_what_is_held_at_a_time():
    """Buffers outlive a step, payloads do not."""
    meter = StepMeter()
    for held in ({"buffers": 100}, {("flight", 0): 10}, {("flight", 1): 30}, {("flight", 0): 5}):
        meter.hold(held)
    meter.hold({("flight", 1): 0})
    meter.finish()
    assert meter.report()["peak_bytes"] == 140
    meter.hold({("flight", 0): 500})
    meter.give_up()
    meter.hold({("flight", 0): 1})
    meter.finish()
    meter.finish()
    assert meter.report()["peak_bytes"] == 100
    meter.clear()
    meter.give_up()
    meter.finish()
    assert meter.report()["peak_bytes"] == 0


def test_what_was_sent_and_given_up_counts():
    meter = StepMeter()
    for sent in (100, 20):
        meter.add(wire_bytes=sent, payload_bytes=sent)
        meter.give_up()
    meter.add(wire_bytes=3)
    meter.finish()
    assert meter.report()["wire_bytes"] == 123 and meter.report()["payload_bytes"] == 0
    meter.finish()
    assert meter.report()["wire_bytes"] == 0


AVERAGED = torch.ones(100)
AVERAGED[20:50] = torch.inf
ERROR = {"squared_error": 2.5, "squared_norm": 2.0}
# A group of a million bytes took 10 ms: 100 MB/s. A float32 ring of 500,000 coordinates sends
# 2 * 3/4 * 2 MB, 30 ms.
SENT = {"coordinates": 500_000, "wire_bytes": 1_000_000, "flight_s": 0.01}
QUICK, SLOW = (
    SENT | {"encode_s": spent / 2, "exchange_s": spent / 4, "decode_s": spent / 4}
    for spent in (0.0299, 0.0301)
)
SMALL = SLOW | {"wire_bytes": 1000}  # what small groups take is latency
OFTEN = FIRST + 2 * WINDOW


def warned(caplog, monitor: Monitor, figures, steps=OFTEN, exchange="allgather", bad=False):
    """Messages after so many equal steps of one group."""
    groups = [{"group": 0, "buckets": 10, "coordinates": 100}]
    codec = begun(monitor, exchange=exchange, groups=groups)
    for step in range(steps):
        if bad:
            codec.meter.look(AVERAGED, 10, 0)
        codec.step(monitor, step, **{field: (amount,) for field, amount in figures.items()})
    return [record.message for record in caplog.records if record.levelname == "WARNING"]


LOSSY = r"squared error of quantised gradients was 1\.25 over 50 steps.* above error_limit=1"
BAD = "150 of 500 averaged buckets were not finite over 50 steps"
COSTLY = r"took 30\.1 ms to encode.* take 30\.0 ms at most, .* carry 100 MB/s"


@pytest.mark.parametrize(
    ("keywords", "figures", "more", "told"),
    [
        ({}, ERROR, {}, LOSSY),
        ({}, ERROR, {"steps": FIRST + WINDOW - 1}, None),
        ({"error_limit": 1.25}, ERROR, {}, None),
        ({"error_limit": None}, ERROR, {}, None),
        ({"non_finite_limit": 0.29}, {}, {"bad": True}, BAD),
        ({"non_finite_limit": 0.3}, {}, {"bad": True}, None),
        ({"non_finite_limit": None}, {}, {"bad": True}, None),
        ({}, SLOW, {}, COSTLY),
        ({}, QUICK, {}, None),
        ({}, SLOW, {"exchange": "auto"}, None),
        ({"warn_slow": False}, SLOW, {}, None),
        ({}, SMALL, {}, None),
    ],
)
def test_warnings_come_once(keywords, figures, more, told, caplog, tmp_path):
    with Monitor(tmp_path, **keywords) as monitor:
        messages = warned(caplog, monitor, figures, **more)
    (path,) = tmp_path.iterdir()
    in_file = path.read_text().count('"kind":"warning","compressor":0')
    assert len(messages) == in_file == (told is not None)
    assert not messages or re.search(told, messages[0])


def test_the_fastest_step_counts(caplog):
    """Others may have waited for slower ranks."""
    monitor = Monitor()
    codec = begun(monitor, groups=[])
    for step in range(FIRST + WINDOW):
        own = SENT | {"exchange_s": 0.02 if step == FIRST + 7 else 1.0}
        codec.step(monitor, step, **{field: (amount,) for field, amount in own.items()})
    assert not caplog.messages
