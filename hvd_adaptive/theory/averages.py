"""Average epsilon_Q and N_Q over a run whose level table changes (ALQ section 4)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hvd_adaptive.theory.arguments import check_count, check_not_negative


@dataclass(frozen=True)
class Segment:
    """Consecutive iterations that use one level table.

    Attributes:
        steps: T_k, number of iterations, >= 1.
        variance_bound: epsilon_{Q,k}, >= 0.
        code_length: N_{Q,k}, bits per iteration and processor, >= 0.
    """

    steps: int
    variance_bound: float
    code_length: float

    def __post_init__(self) -> None:
        check_count("steps", self.steps)
        check_not_negative("variance_bound", self.variance_bound)
        check_not_negative("code_length", self.code_length)


@dataclass
class RunAverages:
    """Averages of a run that the convergence bounds of ALQ Theorems 4 and 6-8 use.

    Segments may hold bounds or measured values. Averages of measured values are estimates of the
    quantities in the theorems. The averages raise ValueError if there are no segments.
    """

    segments: list[Segment] = field(default_factory=list)

    def add(self, steps: int, variance_bound: float, code_length: float = 0.0) -> None:
        """Append a segment.

        Args:
            steps: Number of iterations that use the table, >= 1.
            variance_bound: epsilon_Q of the table, >= 0.
            code_length: N_Q of the table in bits, >= 0.
        """
        self.segments.append(Segment(steps, variance_bound, code_length))

    @property
    def steps(self) -> int:
        """Return T, the number of iterations."""
        return sum(segment.steps for segment in self.segments)

    @property
    def variance_bound(self) -> float:
        """Return epsilon_Q = sum_k T_k epsilon_{Q,k} / T."""
        return self._mean("variance_bound")

    @property
    def code_length(self) -> float:
        """Return N_Q = sum_k T_k N_{Q,k} / T, in bits per iteration and processor."""
        return self._mean("code_length")

    @property
    def total_bits(self) -> float:
        """Return T N_Q, the bits that one processor sends in the whole run."""
        return math.fsum(s.steps * s.code_length for s in self.segments)

    def _mean(self, name: str) -> float:
        if not self.segments:
            raise ValueError("segments: must not be empty")
        return math.fsum(s.steps * getattr(s, name) for s in self.segments) / self.steps
