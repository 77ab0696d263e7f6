"""Averages of epsilon_Q and N_Q along a run whose level table changes (ALQ section 4)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hvd_adaptive.theory.arguments import check_count, check_not_negative


@dataclass(frozen=True)
class Segment:
    """``steps`` iterations with one table: T_k, epsilon_{Q,k}, N_{Q,k}."""

    steps: int
    variance_bound: float
    code_length: float

    def __post_init__(self) -> None:
        check_count("steps", self.steps)
        check_not_negative("variance_bound", self.variance_bound)
        check_not_negative("code_length", self.code_length)


@dataclass
class RunAverages:
    """What the convergence bounds of ALQ Theorems 4 and 6-8 need to know of a run.

    Bounds or measured values alike: averages of what a run really had are estimates of what the
    theorems hold for. Without segments the averages do not exist: ValueError.
    """

    segments: list[Segment] = field(default_factory=list)

    def add(self, steps: int, variance_bound: float, code_length: float = 0.0) -> None:
        """A table in use for ``steps`` >= 1 iterations, its epsilon_Q >= 0 and N_Q >= 0 (bits)."""
        self.segments.append(Segment(steps, variance_bound, code_length))

    @property
    def steps(self) -> int:
        """T."""
        return sum(segment.steps for segment in self.segments)

    @property
    def variance_bound(self) -> float:
        """epsilon_Q = sum_k T_k epsilon_{Q,k} / T."""
        return self._mean("variance_bound")

    @property
    def code_length(self) -> float:
        """N_Q = sum_k T_k N_{Q,k} / T, bits per iteration and processor."""
        return self._mean("code_length")

    @property
    def total_bits(self) -> float:
        """T N_Q, what one processor sends in the whole run."""
        return math.fsum(s.steps * s.code_length for s in self.segments)

    def _mean(self, name: str) -> float:
        if not self.segments:
            raise ValueError("segments: must not be empty")
        return math.fsum(s.steps * getattr(s, name) for s in self.segments) / self.steps
