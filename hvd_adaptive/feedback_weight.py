"""Choose the weight β of error feedback, the same on every rank, and detect residuals that grow.

Source: Abdi and Fekri 2020, Lemma 4.

With z = g + β r and e = z - ẑ the residual becomes r' = (1 - β) r + e (feedback.py). Let the
quantiser be unbiased with E‖e‖² = γ ‖z‖² for the z of this step, and E<g, r> = 0. Then

    E‖r'‖² = ((1 - β)² + β² γ) E‖r‖² + γ E‖g‖².

The factor of E‖r‖² is least, γ/(1 + γ), at β* = 1/(1 + γ), and below 1 for β < 2 β*. Both γ and β
may change from step to step. If β <= 1/(1 + γ) in each step, the factor is at most 1 - β, because
β² (1 + γ) <= β. So E‖r‖² never exceeds (largest γ / least β) times the largest E‖g‖². If γ is
constant, this is γ (1 + γ) E‖g‖², the paper's Eq. 17.

A biased quantiser with ‖e‖² <= ρ ‖z‖², ρ < 1, needs no smaller β than 1. With β = 1/(1 + ρ) its
bound ‖r‖ <= √ρ/(β (1 - √ρ)) max‖g‖ is 1 + ρ times that of β = 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hvd_adaptive import states
from hvd_adaptive.base.checks import is_real
from hvd_adaptive.base.errors import ResidualError

AUTO = "auto"
# Share of the difference by which an adapted weight, or the norm of recent gradients, follows.
FOLLOWS = 1 / 16
# Norm of a residual, relative to recent gradients, that raises an error.
LIMIT = 100.0
# The same, relative to the residual that Lemma 4 allows, if that is larger.
MARGIN = 10.0
# Consecutive steps with too large an error before a warning.
PATIENCE = 3
# Most ranks that the error names.
MOST_NAMED = 8


@dataclass(frozen=True)
class Figures:
    """Figures that all ranks know at the end of a step, the same on each of them.

    Attributes:
        errors: Measured relative error ‖z - ẑ‖²/‖z‖² of each part, over all ranks. Parts of which
            nothing was measured are missing.
        adapted: The least ``Weights.adapted`` of all ranks, which differ only if their states did.
        outgrown: Norm of the residual, relative to recent gradients, of the ranks where it is too
            large.
    """

    errors: Mapping[str, float]
    adapted: Mapping[str, float]
    outgrown: Mapping[int, float]

    @classmethod
    def of(cls, parts: Sequence[str], rows: Sequence[Sequence[float]]) -> Figures:
        """Return the figures in all ranks' ``Weights.row``, added in rank order."""
        ratios, *columns = zip(*rows, strict=True)
        errors, adapted = {}, {}
        for part, error, norm, known in zip(
            parts, columns[::3], columns[1::3], columns[2::3], strict=True
        ):
            adapted[part] = min(known)
            if sum(norm) > 0 and math.isfinite(sum(error) / sum(norm)):
                errors[part] = sum(error) / sum(norm)
        return cls(errors, adapted, {rank: ratio for rank, ratio in enumerate(ratios) if ratio})


@dataclass(frozen=True)
class Weights:
    """β of each part in one step, and what the next step's β follows from.

    Attributes:
        given: The keyword ``error_feedback``: a number, or "auto".
        adapted: 1/(1 + error) of each part, which is β for "auto". It falls at once and rises
            slowly, so in a step β <= 1/(1 + γ) of the step before. Residuals are therefore bounded
            unless 1 + γ doubles between steps again and again.
        above: For each part, in how many consecutive steps the residual grew on average.
        recent: Squared norm of this rank's recent gradients: it rises at once and falls slowly, and
            stays while residuals grow without bound. 0 before the first step.
    """

    given: float | str
    adapted: Mapping[str, float] = field(default_factory=dict)
    above: Mapping[str, int] = field(default_factory=dict)
    recent: float = 0.0

    def of(self, part: str) -> float:
        """Return β of a part: 0 until its error is known, which adds nothing to its gradients."""
        return self.adapted.get(part, 0.0) if self.given == AUTO else float(self.given)

    def limit(self, part: str) -> float:
        """Return the relative error from which residuals grow: (1 - β)² + β² γ >= 1."""
        beta = self.of(part)
        return 2 / beta - 1 if beta else math.inf

    def row(
        self, gradient: float, residual: float, errors: Mapping[str, tuple[float, float]]
    ) -> list[float]:
        """Return what this rank sends: whether its residual is too large, and its measurements.

        Args:
            gradient: Squared norm of the step's quantised coordinates.
            residual: Squared norm of the next residual, 0 if it has not grown.
            errors: Squared norms of the error and of the measured coordinates z of each part.
        """
        recent = self._recent_after(gradient)
        ratio = math.sqrt(residual / recent) if recent else 0.0
        known = [1 / weight - 1 for weight in self.adapted.values()]
        known += [error / norm for error, norm in errors.values() if norm > 0]
        too_large = math.isfinite(gradient) and ratio > largest_ratio(max(known, default=0.0))
        row = [ratio if too_large else 0.0]
        for part, (error, norm) in errors.items():
            row += [error, norm, self.adapted.get(part, 1.0)]
        return row

    def after(self, gradient: float, figures: Figures) -> Weights:
        """Return the weights of the step after one of these figures."""
        adapted = {part: weight for part, weight in figures.adapted.items() if weight < 1}
        for part, error in figures.errors.items():
            known, new = figures.adapted[part], 1 / (1 + error)
            adapted[part] = min(new, known + (new - known) * FOLLOWS)
        grown = [part for part, error in figures.errors.items() if error >= self.limit(part)]
        above = {part: self.above.get(part, 0) + 1 for part in grown}
        return replace(self, adapted=adapted, above=above, recent=self._recent_after(gradient))

    def _recent_after(self, gradient: float) -> float:
        """Return ``recent`` with this step's gradient."""
        # If residuals grow without bound, gradients grow with them, and are no measure of them.
        if max(self.above.values(), default=0) >= PATIENCE or not 0 < gradient < math.inf:
            return self.recent
        return max(gradient, self.recent + (gradient - self.recent) * FOLLOWS)

    def state_dict(self) -> dict[str, Any]:
        """Return {"feedback_weights": {part: β}} of "auto", or {} if none is known."""
        known = self.adapted if self.given == AUTO else {}
        return {"feedback_weights": dict(known)} if known else {}

    def loaded(self, state: Mapping[str, Any]) -> Weights:
        """Return new weights from a compressor's state that ``check_weights`` has accepted."""
        saved = state.get("feedback_weights", {}) if self.given == AUTO else {}
        return Weights(self.given, {part: float(weight) for part, weight in saved.items()})

    # Of the weights of the next step: what they show of the step before.

    def growth_warning(self, figures: Figures) -> str | None:
        """Return a warning if a given β has let residuals grow for PATIENCE steps, or None.

        An unbiased quantiser of relative error γ multiplies E‖r‖² by (1 - β)² + β² γ in each step.
        """
        part = next((part for part, steps in self.above.items() if steps >= PATIENCE), None)
        if part is None or self.given == AUTO:
            return None
        error = figures.errors[part]
        return (
            f"error_feedback={self.given!r}: the measured relative error is {error:.3g}, and was "
            f"at least {self.limit(part):.3g} for {PATIENCE} steps: unless the quantiser is "
            f"biased, residuals grow without bound; error_feedback='auto' follows 1/(1 + error), "
            f"now {1 / (1 + error):.2g}, which keeps them smallest"
        )

    def growth_error(self, number: int, figures: Figures) -> ResidualError | None:
        """Return the error that every rank raises if residuals are too large, or None."""
        if not figures.outgrown:
            return None
        named = [f"{ratio:.3g} times at rank {rank}" for rank, ratio in figures.outgrown.items()]
        named[0] = named[0].replace("times", "times that of recent gradients")
        more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
        worst = max(figures.errors.values(), default=float("nan"))
        remedy = "use error_feedback='auto'"
        if self.given == AUTO:
            remedy = "use more bits, or a smaller learning rate"
        return ResidualError(
            f"step {number}: error_feedback={self.given!r}: residuals have outgrown the gradients: "
            f"their norm is {', '.join(named[:MOST_NAMED])}{more}; the measured relative error of "
            f"quantising is {worst:.3g}. The step is given up on every rank; its gradients are NaN "
            f"now. No parameter has changed; {remedy}"
        )


def largest_ratio(error: float) -> float:
    """Return the largest norm of a residual, relative to the gradient's, that is not an error.

    It is LIMIT, or MARGIN times what Lemma 4 allows at the best β if ``error`` is so large that
    this is more: √(γ (1 + γ)) for an error γ >= 1. A smaller error ρ may be a biased
    quantiser's; then γ/(√(γ + 1) - √γ)² with γ = ρ/(1 - ρ) (Eq. 18) is at most (2 γ + 1)².
    """
    allowed = math.sqrt(error * (1 + error)) if error >= 1 else (1 + error) / (1 - error)
    return max(LIMIT, MARGIN * allowed)


def check_weights(state: Mapping[str, Any]) -> None:
    """Raise ValueError if the weights in a compressor's state are invalid."""
    saved = states.mapping(state.get("feedback_weights", {}), "state: feedback_weights")
    for part, weight in saved.items():
        if not isinstance(part, str) or not is_real(weight) or not 0 < weight <= 1:
            raise ValueError(
                f"state: feedback_weights[{part!r}]={weight!r}: must be a number above 0 and at "
                "most 1, of a part by its label"
            )
