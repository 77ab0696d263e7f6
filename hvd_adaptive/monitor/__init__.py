"""What was sent and how good it was: figures of each step, and where a user wants to see them.

=========  ===========================================================================
meter      collects a step's figures, group by group
monitor    Monitor: records of them, every so many steps, to the sinks
sinks      JSON lines, Python's logging, TensorBoard
alarms     warnings, once each, when compression hurts
log        reads the JSON lines of a run again
=========  ===========================================================================
"""

from hvd_adaptive.monitor.meter import StepFigures, StepMeter
from hvd_adaptive.monitor.monitor import Monitor

__all__ = ["Monitor", "StepFigures", "StepMeter"]
