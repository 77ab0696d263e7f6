"""Steps of training on several ranks, whose averages are judged.

Each rank's gradients follow from seeds, so that every rank knows all of them and the exact average.
A compressor is asked for what is in force in it (levels, second stages, and by its layout which
coordinate shares a bucket with which), never for what is right. A wrong layout shows as a wrong
average.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from oracle.averages import Expected, exact, mean_of, node_means, second_stage
from oracle.cases import vector
from oracle.in_force import quantiser_of
from oracle.laws import law_of
from oracle.rounding import of_full, of_quantised, unit_of
from oracle.verdict import CHANCE, Judge, regions_of

PLAIN = ("float32", "bfloat16")  # what "auto" may choose besides the exchanges
Residuals = list[dict[str, np.ndarray]]  # of each rank, by parameter


@dataclasses.dataclass(frozen=True)
class Case:
    """Everything that a case depends on; its repr makes it again.

    scheme, keywords: of the compressor.  ranks.  shapes, dtypes: of the parameters, in turn.
    law, seed: of the gradients (cases.vector).  alike: all ranks have the same ones.
    summed: op=hvd.Sum.  fastest: what exchange="auto" finds to be.
    then: keywords that are set after the first step.
    missing: the last tensor has no gradient on "one" rank or on "all", at the second step.
    broken: the step in which a coordinate of the first tensor is NaN on the last rank.
    """

    scheme: str
    keywords: dict[str, Any]
    ranks: int
    shapes: Sequence[tuple[int, ...]]
    dtypes: Sequence[str] = ("float32",)
    steps: int = 2
    law: str = "layers"
    seed: int = 0
    alike: bool = False
    summed: bool = False
    fastest: str = ""
    then: dict[str, Any] = dataclasses.field(default_factory=dict)
    missing: str = ""
    broken: int = -1

    @property
    def names(self) -> list[str]:
        return [f"oracle.{slot}" for slot in range(len(self.shapes))]

    def parameters(self) -> list[torch.nn.Parameter]:
        """Zeros."""
        shapes = enumerate(self.shapes)
        return [torch.nn.Parameter(torch.zeros(s, dtype=self._dtype(slot))) for slot, s in shapes]

    def gradient(self, step: int, rank: int, slot: int) -> torch.Tensor | None:
        """1-D. Tensors differ in size, and ranks share a part of each. None for a missing one."""
        if self._is_missing(step, rank, slot):
            return None
        count = int(np.prod(self.shapes[slot]))
        seed = [self.seed, step, slot]
        common = vector(self.law, count, [*seed, 2**20])
        own = 0.0 if self.alike else vector(self.law, count, [*seed, rank])
        scale = 10.0 ** np.random.default_rng([self.seed, slot]).uniform(-2, 0.5)
        values = scale * (common + own)
        if (step, rank, slot) == (self.broken, self.ranks - 1, 0):
            values[count // 2] = np.nan
        return torch.from_numpy(values).to(self._dtype(slot))

    def exact(self, step: int, rank: int) -> list[np.ndarray]:
        """A rank's gradients (float64), zeros for a missing one."""
        found = []
        for slot, shape in enumerate(self.shapes):
            gradient = self.gradient(step, rank, slot)
            zeros = np.zeros(int(np.prod(shape)))
            found.append(zeros if gradient is None else gradient.double().numpy())
        return found

    def _dtype(self, slot: int) -> torch.dtype:
        return getattr(torch, self.dtypes[slot % len(self.dtypes)])

    def _is_missing(self, step: int, rank: int, slot: int) -> bool:
        if step != 1 or slot != len(self.shapes) - 1 or not slot:
            return False
        one = self.missing == "one" and rank == 0 and self.ranks > 1
        return one or self.missing == "all"


class Trial:
    """Judges the steps of a case with a compressor.

    after_step: see ``judge``; ``wrong`` gives what was found.
    """

    def __init__(self, case: Case, compressor: Any) -> None:
        self.case, self.compressor = case, compressor
        self.keywords = dict(case.keywords)
        self._judge = Judge(case.seed)
        self._residuals: Residuals = [{}] * case.ranks
        self._order: list[int] = []

    def wrong(self) -> list[str]:
        """Once all steps are over."""
        return self._judge.end()

    def begin(self, step: int) -> None:
        """Change settings where the case does."""
        if step == 1 and self.case.then:
            self.compressor.set(**self.case.then)
            self.keywords |= self.case.then

    def judge(
        self, step: int, layout: Any, results: Sequence[np.ndarray], residuals: Residuals
    ) -> None:
        """Judge a step's results (of each parameter, 1-D, float64).

        layout: members with names, groups of pieces.  residuals: of all ranks, after the step;
        dictionaries without entries where there is no error feedback.
        """
        case, ranks = self.case, range(self.case.ranks)
        before, self._residuals = self._residuals, residuals
        self._order = [case.names.index(member.name) for member in layout.members]
        scale = 1 / case.ranks if case.summed else 1.0
        gradients = [case.exact(step, rank) for rank in ranks]
        for group in layout.groups:
            vectors = [self._laid_out(group, own) for own in gradients]
            result = self._laid_out(group, results) * scale
            self._judge_group(step, group, vectors, result, before)

    def _judge_group(
        self,
        step: int,
        group: Any,
        vectors: list[np.ndarray],
        result: np.ndarray,
        before: Residuals,
    ) -> None:
        """Its quantised section comes first."""
        warm = step < self.keywords.get("warmup_steps", 0)
        cut, dtype, places = 0 if warm else group.quantized, str(group.dtype), self._places(group)
        if self.case.missing == "all" and step == 1 and len(self.case.names) > 1:
            for absent in places.pop(self.case.names[-1], []):
                if result[absent].any():
                    self._judge.wrong.append("a gradient that no rank has is not zero")
        if result.size > cut:
            full = [v[cut:] for v in vectors]
            expected = exact(np.mean(full, axis=0), self._full_rounding(full, dtype))
            self._judge.see(step, result[cut:], expected, _inside(places, cut, result.size))
        if cut:
            values = [v[:cut] for v in vectors]
            residuals = [self._of_group(group, of_rank, cut) for of_rank in before]
            weight = self.keywords.get("error_feedback") or 0.0
            if weight and self._exchange not in PLAIN:
                pairs = zip(values, residuals, strict=True)
                values = [v.astype(np.float32) + weight * r for v, r in pairs]
            expected = self._expected(self.compressor.parts[group.part], values, dtype)
            self._judge.see(step, result[:cut], expected, _inside(places, 0, cut))
            if weight and self._exchange not in PLAIN:
                after = [self._of_group(group, of_rank, cut) for of_rank in self._residuals]
                exact_mean = np.mean([v[:cut] for v in vectors], axis=0)
                self._nothing_is_lost(step, exact_mean - result[:cut], residuals, after, expected)

    def _expected(self, codec: Any, values: list[np.ndarray], dtype: str) -> Expected:
        """Of the quantised section, given what each rank quantises."""
        kind, per_node = self._exchange, self.keywords.get("ranks_per_node")
        if kind in PLAIN:
            return exact(np.mean(values, axis=0), self._full_rounding(values, dtype))
        if kind == "hierarchical":
            rounding = of_full(values, dtype, 3)
            values = node_means(values, per_node or len(values))
            if len(values) == 1:
                return exact(values[0], rounding)
        values = [v.astype(np.float32).astype(np.float64) for v in values]
        laws = [law_of(quantiser_of(codec, v), v) for v in values]
        law = mean_of(laws)
        expected = Expected(law, of_quantised(laws, dtype, 3))
        if kind == "hierarchical":
            expected.rounding += rounding
        twice = kind == "scatter_reduce" or (kind == "hierarchical" and len(values) > 2)
        second = codec.second_stage(len(values)) if twice else None
        if second is not None and second.bits != 32:
            again = quantiser_of(second.codec, law.mean)
            expected.added, expected.added_reach = second_stage(again, law, CHANCE)
            expected.rounding += of_quantised([law], dtype)
        return expected

    @property
    def _exchange(self) -> str:
        kind = self.keywords.get("exchange", "allgather")
        return self.case.fastest if kind == "auto" else kind

    def _full_rounding(self, vectors: list[np.ndarray], dtype: str) -> np.ndarray:
        rounding = of_full(vectors, dtype, 3)
        if self._exchange == "bfloat16":
            most = sum(np.abs(v) for v in vectors) / len(vectors)
            rounding += 2 * unit_of("bfloat16") * np.nan_to_num(most)
        return rounding

    def _nothing_is_lost(
        self,
        step: int,
        missed: np.ndarray,
        before: list[np.ndarray],
        after: list[np.ndarray],
        expected: Expected,
    ) -> None:
        """Whatever β: what was sent and what is kept add up to all gradients. So the mean residual
        grows by the gradients' mean less the result, but for what a second stage adds. A step with
        a NaN leaves all residuals as they were."""
        if step == self.case.broken:
            if not np.array_equal(after, before):
                self._judge.wrong.append(f"step {step}: a step with a NaN changed residuals")
            return
        lost = np.abs(missed - (np.mean(after, axis=0) - np.mean(before, axis=0)))
        size = np.max([np.abs(v) for v in (*after, *before)], axis=0)
        allowed = 2 * expected.rounding + 2.0**-20 * size
        if expected.added_reach is not None:
            allowed = allowed + expected.added_reach
        if (lost > allowed).any():
            at = int(np.argmax(lost - allowed))
            self._judge.wrong.append(
                f"step {step}: {lost[at]:.6g} of coordinate {at} of a group is neither in the "
                f"result nor in the residuals; {allowed[at]:.3g} is allowed"
            )

    def _of_group(self, group: Any, residuals: dict[str, np.ndarray], cut: int) -> np.ndarray:
        """A rank's residuals, laid out as the group."""
        case = self.case
        empty = [np.zeros(int(np.prod(shape))) for shape in case.shapes]
        tensors = [residuals.get(n, e) for n, e in zip(case.names, empty, strict=True)]
        return self._laid_out(group, tensors)[:cut]

    def _laid_out(self, group: Any, tensors: Sequence[np.ndarray]) -> np.ndarray:
        """The case's tensors, 1-D, as they lie in a group."""
        slots = [(tensors[self._order[piece.slot]], piece) for piece in group.pieces]
        return np.concatenate([tensor[piece.start : piece.stop] for tensor, piece in slots])

    def _places(self, group: Any) -> dict[str, list[slice]]:
        places: dict[str, list[slice]] = {}
        for piece in group.pieces:
            name = self.case.names[self._order[piece.slot]]
            places.setdefault(name, []).append(slice(piece.at, piece.at + piece.stop - piece.start))
        return places


def _inside(places: dict[str, list[slice]], begin: int, end: int) -> dict[str, np.ndarray]:
    """Regions of a section of a group: its tensors, and all of them."""
    parts = {
        name: [slice(max(s.start, begin) - begin, min(s.stop, end) - begin) for s in slices]
        for name, slices in places.items()
        if any(max(s.start, begin) < min(s.stop, end) for s in slices)
    }
    return dict(regions_of(parts))
