"""The step's figures, and the memory that is held."""

from __future__ import annotations

from hvd_adaptive.monitor import StepMeter


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
