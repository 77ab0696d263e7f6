"""Steps of stock hvd.DistributedOptimizer whose averages tests/oracle judges.

Each rank's gradients follow from seeds, so every rank knows all of them and computes the exact
average. The package is asked for what is in force (levels, the layout of groups), never for what
is right.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

import hvd_adaptive
from hvd_adaptive.exchange import auto

sys.path.append(str(Path(__file__).resolve().parents[2]))
from oracle import cases  # noqa: E402
from oracle.averages import Expected, exact, mean_of, node_means, second_stage  # noqa: E402
from oracle.in_force import quantiser_of  # noqa: E402
from oracle.laws import law_of  # noqa: E402
from oracle.rounding import of_full, of_quantised, unit_of  # noqa: E402
from oracle.verdict import CHANCE, Judge, regions_of  # noqa: E402

ALONE = ("float32", "bfloat16")  # what "auto" may choose besides the exchanges


@dataclasses.dataclass(frozen=True)
class Case:
    """Everything that a case depends on; its repr makes it again.

    scheme, keywords: of the compressor.  shapes, dtypes: of the parameters.  law, seed: of the
    gradients (oracle.cases.vector).  alike: all ranks have the same ones.  summed: op=hvd.Sum.
    fastest: what exchange="auto" finds to be.
    """

    scheme: str
    keywords: dict[str, Any]
    shapes: Sequence[tuple[int, ...]]
    dtypes: Sequence[str] = ("float32",)
    steps: int = 2
    law: str = "layers"
    seed: int = 0
    alike: bool = False
    summed: bool = False
    fastest: str = ""

    @property
    def names(self) -> list[str]:
        return [f"oracle.{slot}" for slot in range(len(self.shapes))]

    def dtype(self, slot: int) -> torch.dtype:
        return getattr(torch, self.dtypes[slot % len(self.dtypes)])

    def gradient(self, step: int, rank: int, slot: int) -> torch.Tensor:
        """Tensors differ in size, and ranks share a part of each."""
        count = int(np.prod(self.shapes[slot]))
        seed = [self.seed, step, slot]
        common = cases.vector(self.law, count, [*seed, 2**20])
        own = 0.0 if self.alike else cases.vector(self.law, count, [*seed, rank])
        scale = 10.0 ** np.random.default_rng([self.seed, slot]).uniform(-2, 0.5)
        return torch.from_numpy(scale * (common + own)).to(self.dtype(slot))

    def compressor(self) -> Any:
        return getattr(hvd_adaptive, self.scheme)(**self.keywords)

    @property
    def exchange(self) -> str:
        kind = self.keywords.get("exchange", "allgather")
        return self.fastest if kind == "auto" else kind


class Training:
    """A case's parameters, optimizer and compressor on this rank."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.compressor = case.compressor()
        self.parameters = [
            torch.nn.Parameter(torch.zeros(shape, dtype=case.dtype(slot)))
            for slot, shape in enumerate(case.shapes)
        ]
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.parameters, lr=0.0),
            named_parameters=list(zip(case.names, self.parameters, strict=True)),
            compression=self.compressor,
            op=hvd.Sum if case.summed else hvd.Average,
        )
        self.judge = Judge(case.seed)
        self.residuals: list[dict[str, np.ndarray]] = [{}] * hvd.size()
        self.digest = hashlib.sha256()
        self.order: list[int] = []  # of the layout's slots, among the parameters

    def step(self, step: int) -> None:
        case, ranks = self.case, range(hvd.size())
        gradients = [
            [case.gradient(step, rank, slot).reshape(-1) for slot in range(len(case.shapes))]
            for rank in ranks
        ]
        own = gradients[hvd.rank()]
        loss = sum(
            (p.reshape(-1) * g).sum().double() for p, g in zip(self.parameters, own, strict=True)
        )
        loss.backward()
        self.optimizer.synchronize()
        results = [p.grad.reshape(-1).double().numpy().copy() for p in self.parameters]
        for result in results:
            self.digest.update(result.tobytes())
        before, self.residuals = self.residuals, self._gathered_residuals()
        scale = 1 / hvd.size() if case.summed else 1.0
        # Where coordinates travel is in force, as levels are: a wrong layout shows as a wrong average.
        layout = self.compressor._session._binding.layout
        self.order = [case.names.index(member.name) for member in layout.members]
        for group in layout.groups:
            flats = [[g.double().numpy() for g in gradients[rank]] for rank in ranks]
            vectors = [self._laid_out(group, flat) for flat in flats]
            result = self._laid_out(group, results) * scale
            self._judge(step, group, vectors, result, before)
        for parameter in self.parameters:
            parameter.grad = None

    def _judge(self, step, group, vectors, result, before) -> None:
        """Judge a group; its quantised section comes first."""
        warm = step < self.case.keywords.get("warmup_steps", 0)
        cut = 0 if warm else group.quantized
        named = self._places(group)
        dtype = str(group.dtype)
        full = [v[cut:] for v in vectors]
        if result.size > cut:
            expected = exact(np.mean(full, axis=0), self._full_rounding(full, dtype))
            regions = _inside(named, cut, result.size)
            self.judge.see(step, result[cut:], expected, regions)
        if cut:
            values = [v[:cut].astype(np.float32).astype(np.float64) for v in vectors]
            residuals = [self._of_group(group, rank, cut) for rank in before]
            weight = self.case.keywords.get("error_feedback") or 0.0
            values = [v + weight * r for v, r in zip(values, residuals, strict=True)]
            expected = self._expected(self.compressor.part(group.part), values, dtype)
            self.judge.see(step, result[:cut], expected, _inside(named, 0, cut))
            if weight:
                self._nothing_is_lost(step, group, vectors, result[:cut], residuals, expected)

    def _expected(self, codec: Any, values: list[np.ndarray], dtype: str) -> Expected:
        """Of the quantised section, given what each rank quantises."""
        kind, per_node = self.case.exchange, self.case.keywords.get("ranks_per_node")
        if kind in ALONE:
            return exact(np.mean(values, axis=0), self._full_rounding(values, dtype))
        if kind == "hierarchical":
            values = node_means(values, per_node or len(values))
            if len(values) == 1:
                return exact(values[0], of_full(values, dtype, 3) + 2.0**-22 * np.abs(values[0]))
        laws = [law_of(quantiser_of(codec, v), v) for v in values]
        law = mean_of(laws)
        expected = Expected(law, of_quantised(laws, dtype, 3))
        twice = kind == "scatter_reduce" or (kind == "hierarchical" and len(values) > 2)
        second = codec.second_stage(len(values)) if twice else None
        if second is not None and second.bits != 32:
            again = quantiser_of(second.codec, law.mean)
            expected.added, expected.added_reach = second_stage(again, law, CHANCE)
            expected.rounding += of_quantised([law], dtype)
        return expected

    def _full_rounding(self, vectors: list[np.ndarray], dtype: str) -> np.ndarray:
        rounding = of_full(vectors, dtype, 3)
        if self.case.exchange == "bfloat16":
            most = sum(np.abs(v) for v in vectors) / len(vectors)
            rounding += 2 * unit_of("bfloat16") * most
        return rounding

    def _nothing_is_lost(self, step, group, vectors, result, residuals, expected) -> None:
        """Whatever β: what was sent and what is kept add up to all gradients. So the mean residual
        grows by the gradients' mean less the result, but for what a second stage adds."""
        cut = result.size
        after = [self._of_group(group, rank, cut) for rank in self.residuals]
        kept = np.mean(after, axis=0) - np.mean(residuals, axis=0)
        lost = np.abs(np.mean([v[:cut] for v in vectors], axis=0) - result - kept)
        size = np.max([np.abs(v) for v in (*after, *residuals)], axis=0)
        allowed = 2 * expected.rounding + 2.0**-20 * size
        if expected.added_reach is not None:
            allowed = allowed + expected.added_reach
        if (lost > allowed).any():
            at = int(np.argmax(lost - allowed))
            self.judge.wrong.append(
                f"step {step}: {lost[at]:.6g} of coordinate {at} of a group is neither in the "
                f"result nor in the residuals; {allowed[at]:.3g} is allowed"
            )

    def _of_group(self, group, residuals: dict[str, np.ndarray], cut: int) -> np.ndarray:
        """A rank's residuals, laid out as the group."""
        empty = [np.zeros(int(np.prod(shape))) for shape in self.case.shapes]
        tensors = [residuals.get(n, e) for n, e in zip(self.case.names, empty, strict=True)]
        return self._laid_out(group, tensors)[:cut]

    def _laid_out(self, group, tensors: Sequence[np.ndarray]) -> np.ndarray:
        """The case's tensors, 1-D, as they lie in a group."""
        slots = [(tensors[self.order[piece.slot]], piece) for piece in group.pieces]
        return np.concatenate([tensor[piece.start : piece.stop] for tensor, piece in slots])

    def _places(self, group) -> dict[str, list[slice]]:
        names: dict[str, list[slice]] = {}
        for piece in group.pieces:
            name = self.case.names[self.order[piece.slot]]
            names.setdefault(name, []).append(slice(piece.at, piece.at + piece.stop - piece.start))
        return names

    def _gathered_residuals(self) -> list[dict[str, np.ndarray]]:
        """Every rank's, by parameter."""
        if self.case.keywords.get("error_feedback") is None:
            return self.residuals
        state = self.compressor.state_dict().get("residuals", {"parameters": {}})
        own = {name: r.double().numpy() for name, r in state["parameters"].items()}
        return hvd.allgather_object(own, name="oracle.residuals")


def _inside(places: dict[str, list[slice]], begin: int, end: int) -> dict[str, np.ndarray]:
    """Regions of a section of a group."""
    parts = {
        name: [slice(max(s.start, begin) - begin, min(s.stop, end) - begin) for s in slices]
        for name, slices in places.items()
        if any(max(s.start, begin) < min(s.stop, end) for s in slices)
    }
    return dict(regions_of(parts, end - begin))


def wrong_in(case: Case) -> list[str]:
    """What is wrong on any rank; the same list on all of them, which must all call this."""
    measure = auto.measure
    if case.fastest:
        auto.measure = lambda *of, **k: 1.0 if of[4].endswith(f".{case.fastest}") else 2.0
    try:
        training = Training(case)
        for step in range(case.steps):
            training.step(step)
        own = training.judge.end(), training.digest.hexdigest()
    except Exception:
        # The other ranks may wait for this one: they are ended with the job, and the case is told.
        print(f"rank {hvd.rank()}: {case}\n{traceback.format_exc()}", flush=True)
        own = [traceback.format_exc(limit=-3)], ""
    finally:
        auto.measure = measure
    everyone = hvd.allgather_object(own, name="oracle.verdict")
    found = [f"rank {rank}: {line}" for rank, (lines, _) in enumerate(everyone) for line in lines]
    if len({digest for _, digest in everyone}) > 1:
        found.append("the ranks' results differ")
    return found


def judge_case(case: Case) -> None:
    """Fail on all ranks together, with the case that makes the failure again."""
    found = wrong_in(case)
    told = "\n".join(found[:12])
    assert not found, f"{len(found)} wrong with {case}\n{told}"
