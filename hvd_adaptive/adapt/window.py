"""Define SampleWindow, the statistics of the last steps, which the next fit is based on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hvd_adaptive import states
from hvd_adaptive.adapt.schedule import WINDOW

OF = "state: window"
# Bytes of earlier steps above which a rank keeps fewer of them, but at least one.
MOST_BYTES = 1 << 26


class SampleWindow:
    """Statistics of the last ``WINDOW`` steps, by rank and part.

    A rank has its own alone; a simulation has those of all ranks. A step of a part takes 40 kB with
    ALQ, whatever the sizes of buckets. There is nothing unless a fit follows soon.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, str], dict[int, np.ndarray]] = {}

    def add(self, worker: int, step: int, own: Mapping[str, np.ndarray]) -> None:
        """Keep the statistics of ``step`` by label.

        They replace those of an earlier attempt at the step, and of any later step: a restored
        state goes back.
        """
        most = max(1, MOST_BYTES // sum(vector.nbytes for vector in own.values()))
        for label, vector in own.items():
            earlier = self._earlier(worker, step, label)
            last = dict([*earlier.items()][-most:])
            self._kept[worker, label] = last | {step: vector}

    def before(self, worker: int, step: int, label: str) -> list[np.ndarray]:
        """Return the statistics of the steps before ``step`` that count for a fit at it."""
        return [*self._earlier(worker, step, label).values()]

    def _earlier(self, worker: int, step: int, label: str) -> dict[int, np.ndarray]:
        kept = self._kept.get((worker, label), {})
        return {s: vector for s, vector in kept.items() if step - WINDOW < s < step}

    def clear(self) -> None:
        """Drop everything: no fit follows soon."""
        self._kept.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return {"window": ...} as plain tensors; {} if there is nothing."""
        if not self._kept:
            return {}
        of_workers: dict[str, dict[str, Any]] = {}
        for (worker, label), kept in self._kept.items():
            of_workers.setdefault(str(worker), {})[label] = {
                "steps": torch.tensor([*kept], dtype=torch.int64, device="cpu"),
                "statistics": torch.from_numpy(np.concatenate([*kept.values()])),
            }
        return {"window": of_workers}

    @classmethod
    def loaded(cls, state: Mapping[str, Any], length: int) -> SampleWindow:
        """Return the window of a ``state_dict``, whose vectors have ``length`` numbers.

        Raises:
            ValueError: The state is not a window's.
        """
        window = cls()
        for worker, parts in states.mapping(state.get("window", {}), OF).items():
            for label, saved in states.mapping(parts, OF).items():
                if not (str(worker).isdecimal() and isinstance(label, str)):
                    raise ValueError(f"{OF}: has no rank {worker!r} with a part {label!r}")
                window._kept[int(worker), label] = _vectors(saved, length)
        return window


def _vectors(saved: Any, length: int) -> dict[int, np.ndarray]:
    """Return vectors by step; raise ValueError if there are none such."""
    steps = states.numbers(saved, "steps", OF)
    whole = np.isfinite(steps) & (steps >= 0) & (steps == np.round(steps))
    if not (whole.all() and (np.diff(steps) > 0).all() and steps.size <= WINDOW):
        raise ValueError(
            f"{OF}: steps must be up to {WINDOW} ascending integers >= 0, not {steps.tolist()}"
        )
    flat = states.numbers(saved, "statistics", OF)
    if flat.size != steps.size * length or not np.isfinite(flat).all():
        raise ValueError(f"{OF}: statistics must be {steps.size} x {length} finite numbers")
    vectors = flat.copy().reshape(-1, length)
    return {int(step): vector for step, vector in zip(steps, vectors, strict=True)}
