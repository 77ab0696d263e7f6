"""Every state that training can reach loads again, and continues the run bit for bit.

Steps of two simulated ranks, whose gradients are such as break statistics: zero, not finite, empty,
huge, tiny, of one coordinate. Fits fail on some of them. After each step a compressor of the same
settings loads the state from a file; then both encode the same payloads, and take the next step.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from scheme_cases import CASES
from settings_objects import exchange_of
from simulated_steps import take_step
from states import plain, through_disk

from hvd_adaptive import ScatterReduce, Tuning
from hvd_adaptive.base.errors import ResidualError
from hvd_adaptive.changes import begin_step
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.simulate import Ranks

RANKS, BUCKET = 2, 64
EXAMPLES = 100 if "HVD_ADAPTIVE_EVERY_CASE" in os.environ else 15
SIZES = {"a": 300, "b": 130, "small": 5, "empty": 0}


def normal(n: int, seed: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def with_one(v: torch.Tensor, value: float) -> torch.Tensor:
    v[v.numel() // 2 : v.numel() // 2 + 1] = value
    return v


GRADIENTS = {
    "none": lambda n, seed: None,
    "zero": lambda n, seed: torch.zeros(n),
    "minus zero": lambda n, seed: torch.full((n,), -0.0),
    "normal": normal,
    "heavy": lambda n, seed: normal(n, seed) ** 9,
    "one coordinate": lambda n, seed: with_one(torch.zeros(n), -2.0),
    "one bucket": lambda n, seed: torch.where(torch.arange(n) < BUCKET, normal(n, seed), 0.0),
    "equal": lambda n, seed: torch.full((n,), 0.5),
    "one NaN": lambda n, seed: with_one(normal(n, seed), torch.nan),
    "one Inf": lambda n, seed: with_one(normal(n, seed), -torch.inf),
    "NaN": lambda n, seed: torch.full((n,), torch.nan),
    "huge": lambda n, seed: normal(n, seed).sign() * 3e38,
    "large": lambda n, seed: normal(n, seed) * 1e30,
    "tiny": lambda n, seed: normal(n, seed) * 1e-30,
    "subnormal": lambda n, seed: normal(n, seed) * 1e-42,
    "beyond float32": lambda n, seed: normal(n, seed).double() * 1e300,
    "both": lambda n, seed: normal(n, seed) * 10.0 ** (30 - 60 * (torch.arange(n) % 2)),
}
kinds = st.sampled_from(sorted(GRADIENTS))
MORE: dict[str, dict[str, Any]] = {
    "": {},
    "parts": {"parameter_bits": {"b": 4}},
    "tensors": {"scope": "tensor"},
    "feedback": {"error_feedback": 0.5},
    "auto": {"error_feedback": "auto"},
    "zeros": {"keep_zeros": False},
    "huffman": {"coding": "huffman"},
    "elias": {"coding": "elias"},
    "clipped": {"clip": 1.5},
    "full tail": {"tail": "full"},
    "warm-up": {"warmup_steps": 1},
}


def build(name: str, more: str, exchange: str) -> GradientCompressor:
    """A compressor; ValueError if the scheme refuses such keywords."""
    own = {"bucket_size": BUCKET, "min_numel": 16, "seed": 5}
    own["exchange"] = exchange_of(exchange, ranks_per_node=1)
    if hasattr(CASES[name]().parts.default, "adaptation"):
        own["update_steps"] = [0, 1, 3]
    try:
        return CASES[name](**own | MORE[more])
    except TypeError:  # no table is fitted
        del own["update_steps"]
        return CASES[name](**own | MORE[more])


class Run:
    """Two ranks of a training."""

    def __init__(self, compressor: GradientCompressor, dtype: torch.dtype) -> None:
        self.compressor, self.dtype = compressor, dtype
        self.parameters = {
            name: torch.nn.Parameter(torch.zeros(size, dtype=dtype)) for name, size in SIZES.items()
        }
        self.ranks = Ranks(self.parameters.items(), compressor, RANKS)

    def step(self, step: list[list[str]]) -> list[torch.Tensor]:
        """Take a step with gradients of these kinds, by rank and parameter; return the averages."""
        number, gradients = self.compressor.step, []
        for rank, of_rank in enumerate(step):
            own = [
                GRADIENTS[kind](size, 100 * number + rank)
                for kind, size in zip(of_rank, SIZES.values(), strict=True)
            ]
            gradients.append([None if g is None else g.to(self.dtype) for g in own])
        averages = take_step(self.ranks, number, list(self.parameters.values()), gradients)
        self.compressor.step += 1
        return averages

    def change(self, **settings: Any) -> None:
        """Change settings; the step after it takes them."""
        self.compressor.set(**settings)
        begin_step(self.compressor)
        self.ranks = self.ranks.renewed()

    def states(self) -> list[dict]:
        """What each rank saves: the tables, and residuals of its own."""
        table = self.compressor.state_dict()
        return [table | r.state_dict() for r in self.ranks.residuals] or [table]

    def resumed(self, new: GradientCompressor) -> Run:
        """The same, after every rank has loaded what it saved."""
        loaded = []
        for rank, state in enumerate(map(through_disk, self.states())):
            new.load_state_dict(state)  # residuals included
            if self.ranks.residuals:
                loaded.append(new._training.residuals.loaded(state))
            assert plain(new.state_dict()) == plain(self.states()[rank])
        run = Run(new, self.dtype)
        for rank, residuals in enumerate(loaded):
            run.ranks.residuals[rank] = residuals
            residuals.lay_out(run.ranks.layout, rank, RANKS)
        return run


def payloads(compressor: GradientCompressor) -> list[bytes]:
    """Of every part, and of its averages."""
    flat, found = normal(3 * BUCKET + 7, 99), []
    for codec in compressor.parts.values():
        averages = None if codec.second is None else codec.second.codec
        for each in dict.fromkeys((codec, averages or codec)):
            found.append(each.payloads.encode(flat, flat.numel(), 3).bytes.numpy().tobytes())
    return found


CHANGES: list[dict[str, Any]] = [
    {"bucket_size": 2 * BUCKET},
    {"tuning": Tuning(checksum=False)},
    {"min_numel": 200},
    {"seed": 9},
    {"exchange": ScatterReduce(second_stage_bits=5)},
    {"bits": 4},
    {"error_feedback": 0.25},
]
steps = st.lists(
    st.lists(st.lists(kinds, min_size=len(SIZES), max_size=len(SIZES)), min_size=2, max_size=2),
    min_size=1,
    max_size=4,
)


@settings(max_examples=EXAMPLES, deadline=None)
@example(  # a codec of averages that kept the seed of before
    name="eden-4",
    more="",
    exchange="scatter_reduce",
    course=[[["normal"] * 4] * 2] * 2,
    fitted=None,
    dtype=torch.float32,
    changes=[None, {"seed": 9}, None, None],
)
@given(
    st.sampled_from(sorted(CASES)),
    st.sampled_from(sorted(MORE)),
    st.sampled_from(["allgather", "scatter_reduce", "hierarchical"]),
    steps,
    st.sampled_from([None, *sorted(set(GRADIENTS) - {"none"})]),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]),
    st.lists(st.sampled_from([None, *CHANGES]), min_size=4, max_size=4),
)
def test_every_state_that_can_be_reached_loads(
    name, more, exchange, course, fitted, dtype, changes
):
    try:
        run = Run(build(name, more, exchange), dtype)
    except ValueError:
        event("refused")
        return
    if fitted is not None and hasattr(run.compressor, "fit"):
        try:
            run.compressor.fit(GRADIENTS[fitted](300, 1).float())
        except ValueError:
            event("not fitted")
    for step, change in zip(course, changes, strict=False):
        if change is not None:
            try:
                run.change(**change)
            except (TypeError, ValueError):  # not for this scheme
                event("not changed")
        other = run.resumed(build(name, more, exchange))
        assert payloads(run.compressor) == payloads(other.compressor)
        try:
            averages, same = run.step(step), other.step(step)
        except ResidualError:
            event("residuals have outgrown the gradients")
            break
        assert [plain(a) for a in averages] == [plain(a) for a in same]
        assert [plain(s) for s in run.states()] == [plain(s) for s in other.states()]
    other = run.resumed(build(name, more, exchange))
    assert payloads(run.compressor) == payloads(other.compressor)
