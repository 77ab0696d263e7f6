"""Define Placeholders: the tensors that Horovod reduces instead of gradients, kept between steps.

They are made once for a layout: new tensors for each of thousands of gradients would cost time in
each step, for themselves and for the garbage collector.
"""

from __future__ import annotations

import numpy as np
import torch

from hvd_adaptive.hooks.horovod.placeholder import ENTRIES, Template
from hvd_adaptive.transport.in_flight import reference


class Placeholders:
    """Hold a placeholder for each gradient of a layout.

    Args:
        count: Number of gradients.
    """

    def __init__(self, count: int) -> None:
        self._values = np.empty((count, ENTRIES), dtype=np.float64)
        self._tensors = [torch.from_numpy(row) for row in self._values]
        self._references = [reference(tensor) for tensor in self._tensors]

    def __len__(self) -> int:
        return len(self._tensors)

    def begin(self, template: Template) -> None:
        """Begin a step. Horovod must have reduced all placeholders of the one before."""
        template.fill(self._values)

    def of(self, slot: int, absent: bool = False) -> torch.Tensor:
        """Return the tensor that Horovod reduces in place of a gradient; see Template."""
        if absent:
            Template.mark_absent(self._values[slot])
        return self._tensors[slot]
