"""Whether averages lie within the errors that their exact laws allow.

A judge sees the results of a case's steps. For each tensor, each group, and everything, in each
step and over all steps it compares

- every coordinate with the values that it can have at all;
- the summed squared error with its exact mean, from above and (without second stage) from below;
- the error's sum, as it is, towards zero, and with random signs, with 0: the result is unbiased.

Sums are compared by Bernstein's inequality. All comparisons of a case together fail by chance
with a probability of at most 5.7e-7, five sigma of a normal deviate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from oracle.averages import Expected
from oracle.bounds import FIVE_SIGMA, deviation

# Comparisons of sums in a case, at most.
COMPARISONS = 8192
CHANCE = FIVE_SIGMA / COMPARISONS


@dataclass
class Sum:
    """An error along a direction, over steps."""

    value: float = 0.0
    variance: float = 0.0
    largest: float = 0.0
    added: float = 0.0
    added_largest: float = 0.0
    rounding: float = 0.0

    def __iadd__(self, other: Sum) -> Sum:
        self.value += other.value
        self.variance += other.variance
        self.added += other.added
        self.rounding += other.rounding
        self.largest = max(self.largest, other.largest)
        self.added_largest = max(self.added_largest, other.added_largest)
        return self

    def limit(self) -> float:
        """Of its absolute value."""
        limit = deviation(self.variance, self.largest, CHANCE)
        if self.added_largest:
            limit += deviation(self.added, self.added_largest, CHANCE)
        return limit + self.rounding


@dataclass
class Judge:
    """Collects what is wrong; ``seed`` is of the random directions."""

    seed: int = 0
    wrong: list[str] = field(default_factory=list)
    compared: int = 0
    _along: dict[tuple[str, int], Sum] = field(default_factory=dict)

    def see(
        self, step: int, result: np.ndarray, expected: Expected, regions: Mapping[str, np.ndarray]
    ) -> None:
        """Judge one group's result of one step; regions: indices into it, by name."""
        law = expected.law
        self._values(step, result, expected, regions)
        rng = np.random.default_rng([self.seed, step])
        directions = (
            np.ones(result.size),
            np.where(law.mean < 0, -1.0, 1.0),
            rng.choice([-1.0, 1.0], result.size),
        )
        for name, where in regions.items():
            where = where[np.isfinite(law.mean[where])]
            if not where.size:
                continue
            self._energy(f"step {step}, {name}", result, expected, where)
            for number, direction in enumerate(directions):
                w = np.zeros(result.size)
                w[where] = direction[where]
                along = self._sum(result, expected, w)
                self._compare(f"step {step}, {name}, direction {number}", along)
                self._along.setdefault((name, number), Sum())
                self._along[name, number] += along

    def end(self) -> list[str]:
        """Judge sums over steps; returns what is wrong."""
        for (name, number), along in self._along.items():
            self._compare(f"all steps, {name}, direction {number}", along)
        if self.compared > COMPARISONS:
            raise ValueError(f"{self.compared} comparisons, and {COMPARISONS} are allowed for")
        return self.wrong

    def _values(
        self, step: int, result: np.ndarray, expected: Expected, regions: Mapping[str, np.ndarray]
    ) -> None:
        law, slack = expected.law, expected.rounding
        if expected.added_reach is not None:
            slack = slack + expected.added_reach
        with np.errstate(invalid="ignore"):
            outside = (result < law.low - slack) | (result > law.high + slack)
        outside |= np.isnan(result) != np.isnan(law.mean)
        for name, where in regions.items():
            bad = where[outside[where]]
            if bad.size:
                i = bad[0]
                self.wrong.append(
                    f"step {step}, {name}: {bad.size} of {where.size} coordinates are impossible; "
                    f"coordinate {i} of the group is {result[i]:.9g}, exactly {law.mean[i]:.9g}, "
                    f"allowed {law.low[i]:.9g} to {law.high[i]:.9g}, and {slack[i]:.3g} more"
                )

    def _energy(self, told: str, result: np.ndarray, expected: Expected, where: np.ndarray) -> None:
        law = expected.law
        seen = math.sqrt(float(((result[where] - law.mean[where]) ** 2).sum()))
        rounding = float(np.linalg.norm(expected.rounding[where]))
        mean, spread, largest = _energy_of(law, where)
        away = deviation(spread, largest, CHANCE)
        most = mean + away
        if expected.added is not None:
            reach, added = expected.added_reach[where], expected.added[where]
            own = float(added.sum())
            # Of 2 Σ e_i a_i, given the first stage's errors e.
            cross = min(float((law.reach[where] ** 2) @ added), float(added.max()) * most)
            at_once = 2 * float((law.reach[where] * reach).max())
            cross = deviation(4 * cross, at_once, CHANCE)
            largest = float((reach**2).max())
            most += own + deviation(own * largest, largest, CHANCE) + cross
        self.compared += 4
        if seen > math.sqrt(most) + rounding:
            self.wrong.append(
                f"{told}: the squared error is {seen**2:.6g}; {most:.6g} is the most, {mean:.6g} "
                "the first stage's mean"
            )
        least = 0.0 if law.block is not None or expected.added is not None else mean - away
        if seen < math.sqrt(max(least, 0.0)) - rounding:
            self.wrong.append(
                f"{told}: the squared error is {seen**2:.6g}, too little: {least:.6g} is the "
                f"least, {mean:.6g} its mean"
            )

    def _sum(self, result: np.ndarray, expected: Expected, w: np.ndarray) -> Sum:
        law, used = expected.law, w != 0
        error, size = result[used] - law.mean[used], np.abs(w[used])
        found = Sum(float(w[used] @ error), rounding=float(size @ expected.rounding[used]))
        if law.block is None:
            found.variance = float(size**2 @ law.variance[used])
            found.largest = float((size * law.reach[used]).max())
        else:
            found.variance = law.quadratic(w)
            squares = np.bincount(law.block[used], size**2, law.block_energy.size)
            found.largest = math.sqrt(float((squares * law.block_energy).max()))
        if expected.added is not None:
            found.added = float(size**2 @ expected.added[used])
            found.added_largest = float((size * expected.added_reach[used]).max())
        return found

    def _compare(self, told: str, along: Sum) -> None:
        self.compared += 2
        if abs(along.value) > along.limit():
            self.wrong.append(
                f"{told}: the error sums up to {along.value:.6g}; at most {along.limit():.6g}, "
                f"with a deviation of {math.sqrt(along.variance + along.added):.3g}"
            )


def _energy_of(law, where: np.ndarray) -> tuple[float, float, float]:
    """Mean and variance of the summed squared error, and the most of one term."""
    mean = float(law.variance[where].sum())
    if law.block is None:
        spread = float((law.fourth[where] - law.variance[where] ** 2).sum())
        return mean, max(spread, 0.0), float((law.reach[where] ** 2).max())
    largest = float(law.block_energy[np.unique(law.block[where])].max())
    return mean, mean * largest, largest


def regions_of(pieces: Mapping[str, list[slice]]) -> Iterator[tuple[str, np.ndarray]]:
    """Indices of each tensor's pieces in a group, and of all of them."""
    own = {
        name: np.concatenate([np.arange(s.start, s.stop) for s in slices])
        for name, slices in pieces.items()
    }
    if len(own) > 1:
        yield from own.items()
    if own:
        yield "all tensors of the group", np.concatenate(list(own.values()))
