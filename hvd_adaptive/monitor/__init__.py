"""Measure what each step sends and how accurate it is, and write the figures to sinks.

=========  =========================================================================== meter
collects a step's figures, group by group monitor    Monitor: writes records of the figures to the
sinks at regular steps sinks      JSON lines, Python's logging, TensorBoard alarms     warnings,
once each, when compression does harm log        reads the JSON lines of a run =========
===========================================================================
"""

from hvd_adaptive.monitor.meter import StepFigures, StepMeter
from hvd_adaptive.monitor.monitor import Monitor

__all__ = ["Monitor", "StepFigures", "StepMeter"]
