"""Measure what each step sends and how accurate it is, and write the figures to sinks.

meter collects a step's figures, group by group. monitor writes their means at regular steps to
sinks, and alarms warns once if compression does harm. log has the sinks, and reads JSON lines.
"""

from hvd_adaptive.monitor.meter import StepFigures, StepMeter
from hvd_adaptive.monitor.monitor import Monitor

__all__ = ["Monitor", "StepFigures", "StepMeter"]
