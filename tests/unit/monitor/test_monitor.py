"""The step's figures, the memory that is held, and warnings when compression hurts: when they come,
and that they come once."""

from __future__ import annotations

import pytest
import torch
from watched import begun

from hvd_adaptive import Monitor
from hvd_adaptive.monitor import StepMeter
from hvd_adaptive.monitor.alarms import FIRST, WINDOW


def test_peak_of_what_is_held_at_a_time():
    meter = StepMeter()
    meter.hold({"buffers": 100})
    meter.hold({("flight", 0): 10})
    meter.hold({("flight", 1): 30})
    meter.hold({("flight", 0): 5})
    meter.hold({("flight", 1): 0})
    meter.finish()
    assert meter.report()["peak_bytes"] == 140


def test_buffers_outlive_a_step_and_payloads_do_not():
    meter = StepMeter()
    meter.hold({"buffers": 100})
    meter.hold({("flight", 0): 10})
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


def warned(caplog, monitor: Monitor, steps: int, exchange="allgather", averaged=None, **figures):
    """Messages after so many equal steps of one group."""
    groups = [{"group": 0, "buckets": 10, "coordinates": 100}]
    codec = begun(monitor, exchange=exchange, groups=groups)
    for step in range(steps):
        if averaged is not None:
            codec.meter.look(averaged, 10, 0)
        codec.step(monitor, step, **{field: (amount,) for field, amount in figures.items()})
    return [record.message for record in caplog.records if record.levelname == "WARNING"]


def test_of_the_relative_error(caplog):
    figures = {"squared_error": 2.5, "squared_norm": 2.0}
    assert warned(caplog, Monitor(), FIRST + WINDOW - 1, **figures) == []
    assert warned(caplog, Monitor(error_limit=1.25), FIRST + WINDOW, **figures) == []
    assert warned(caplog, Monitor(error_limit=None), FIRST + WINDOW, **figures) == []
    (message,) = warned(caplog, Monitor(), FIRST + 3 * WINDOW, **figures)
    assert "squared error of quantised gradients was 1.25 over 50 steps" in message
    assert "above error_limit=1" in message


def test_of_buckets_that_are_not_finite(caplog):
    averaged = torch.ones(100)
    averaged[20:50] = torch.inf
    steps = FIRST + 2 * WINDOW
    assert warned(caplog, Monitor(non_finite_limit=0.3), steps, averaged=averaged) == []
    assert warned(caplog, Monitor(non_finite_limit=None), steps, averaged=averaged) == []
    (message,) = warned(caplog, Monitor(non_finite_limit=0.29), steps, averaged=averaged)
    assert message.startswith("150 of 500 averaged buckets were not finite over 50 steps")


# A group of a million bytes took 10 ms: 100 MB/s. A float32 ring of 500,000 coordinates sends
# 2 * 3/4 * 2 MB, 30 ms.
SENT = {"coordinates": 500_000, "wire_bytes": 1_000_000, "flight_s": 0.01}


@pytest.mark.parametrize(
    ("spent", "exchange", "warns"),
    [(0.0299, "allgather", False), (0.0301, "allgather", True), (0.5, "auto", False)],
)
def test_of_time_that_float32_would_not_have_taken(caplog, spent, exchange, warns):
    times = {"encode_s": spent / 2, "exchange_s": spent / 4, "decode_s": spent / 4}
    told = warned(caplog, Monitor(), FIRST + 2 * WINDOW, exchange, **SENT, **times)
    assert len(told) == warns
    if warns:
        assert "took 30.1 ms to encode" in told[0] and "30.0 ms at most" in told[0]
        assert "carry 100 MB/s" in told[0]


def test_the_fastest_step_counts(caplog):
    """Others may have waited for slower ranks."""
    monitor = Monitor()
    codec = begun(monitor, groups=[])
    for step in range(FIRST + WINDOW):
        own = SENT | {"exchange_s": 0.02 if step == FIRST + 7 else 1.0}
        codec.step(monitor, step, **{field: (amount,) for field, amount in own.items()})
    assert not caplog.messages


def test_time_is_compared_only_where_it_can_be(caplog):
    slow = SENT | {"exchange_s": 1.0}
    assert warned(caplog, Monitor(warn_slow=False), FIRST + WINDOW, **slow) == []
    # What small groups take is latency.
    assert warned(caplog, Monitor(), FIRST + WINDOW, **slow | {"wire_bytes": 1000}) == []


def test_warnings_are_in_the_file_too(caplog, tmp_path):
    with Monitor(tmp_path) as monitor:
        warned(caplog, monitor, FIRST + WINDOW, squared_error=9.0, squared_norm=1.0)
    (path,) = tmp_path.iterdir()
    assert '"kind":"warning","compressor":0' in path.read_text()
    assert '"about":"error"' in path.read_text()
