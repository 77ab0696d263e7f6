"""As much of a compressor as a monitor sees."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from hvd_adaptive import Monitor
from hvd_adaptive.monitor import StepMeter

GROUPS = [
    {"group": 0, "buckets": 10, "coordinates": 3},
    {"group": 1, "buckets": 5, "coordinates": 4},
]
FACTS = {"scheme": "S()", "rank": 0, "ranks": 4, "exchange": "allgather", "groups": GROUPS}


class Codec:
    """A compressor of one part; its test says what each step of a group amounts to."""

    def __init__(self, detailed: bool = True) -> None:
        self.meter, self.table_version = StepMeter(), 0
        self._training = SimpleNamespace(meter=self.meter)
        self.meter.detailed = detailed
        self.levels = torch.tensor([-1.0, 0.25, 1.0], dtype=torch.float64)
        self.parts = {"": self}

    def step(self, monitor: Monitor, number: int, **figures: tuple[float, ...]) -> None:
        """A step whose figures in each group are given."""
        for field, of_groups in figures.items():
            for group, amount in enumerate(of_groups):
                self.meter.add(group, **{field: amount})
        self.meter.finish()
        monitor.step(self, number)


def begun(monitor: Monitor, **changes) -> Codec:
    codec = Codec()
    monitor.begin(codec, FACTS | changes)
    return codec
