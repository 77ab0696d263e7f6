"""The step's figures, and the memory that is held."""

from __future__ import annotations

from hvd_adaptive.monitor import StepMeter


def test_peak_of_what_is_held_at_a_time():
    meter = StepMeter()
    meter.hold("buffers", 100)
    meter.hold(("flight", 0), 10)
    meter.hold(("flight", 1), 30)
    meter.hold(("flight", 0), 5)
    meter.hold(("flight", 1), 0)
    meter.finish()
    assert meter.report()["peak_bytes"] == 140


def test_buffers_outlive_a_step_and_payloads_do_not():
    meter = StepMeter()
    meter.hold("buffers", 100)
    meter.hold(("flight", 0), 10)
    meter.restart()  # the step was given up
    meter.hold(("flight", 0), 1)
    meter.finish()
    meter.finish()
    assert meter.report()["peak_bytes"] == 100
    meter.clear()
    meter.restart()
    meter.finish()
    assert meter.report()["peak_bytes"] == 0
