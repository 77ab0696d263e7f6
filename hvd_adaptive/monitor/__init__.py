"""Measure what each step sends and how accurate it is, and write the figures to sinks.

meter collects a step's figures, group by group. monitor writes their means at regular steps to the
sinks (sinks), and alarms warns once if compression does harm. log reads a run's JSON lines.
"""

from hvd_adaptive.monitor.meter import StepFigures, StepMeter
from hvd_adaptive.monitor.monitor import Monitor

__all__ = ["Monitor", "StepFigures", "StepMeter"]
