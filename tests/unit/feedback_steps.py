"""Steps of a lone rank without Horovod: what it sends comes back to it."""

from __future__ import annotations

import string
from types import SimpleNamespace

import torch

from hvd_adaptive.feedback_weight import Figures, Weights
from hvd_adaptive.layout import Member, build_layout
from hvd_adaptive.run.rank_context import RankContext
from hvd_adaptive.run.unordered import UnorderedStep


class OneRank(RankContext):
    """A compressor and the gradients of members "a", "b", ... of these sizes.

    rank_info: rank and size that its residuals are told.  fusion: coordinates of a group.
    """

    def __init__(self, compressor, sizes, dtypes=(), rank_info=(0, 1), fusion=None) -> None:
        compressor._training.instance.number = 0  # as in a process of its own
        world = SimpleNamespace(
            rank=0,
            size=1,
            allgather=lambda payload, name: payload,
            synchronize=lambda handle: handle,
            sends_directly=False,
        )
        super().__init__(compressor, world, "test")
        self.rank_info = rank_info
        own = {} if fusion is None else {"most_coordinates": fusion}
        dtypes = dtypes or [torch.float32] * len(sizes)
        members = [
            Member(name, (size,), dtype, compressor.parts.label_of(name))
            for name, size, dtype in zip(string.ascii_lowercase, sizes, dtypes, strict=False)
        ]
        self.layout = self.build_layout(lambda **rest: build_layout(members, **rest | own))

    def buffer(self, use, coordinates, dtype, device):
        return torch.full((coordinates,), 7.0, dtype=dtype)

    def begin(self, attempt: int = 0) -> UnorderedStep:
        """As the session makes a step."""
        residuals = self.compressor._training.residuals
        if residuals is not None:
            residuals.lay_out(self.layout, *self.rank_info)
        return UnorderedStep(self, self.layout, attempt)

    def send(self, step: UnorderedStep, gradients) -> UnorderedStep:
        """Gradients by slot arrive (None: is missing) and all groups leave."""
        for slot, gradient in enumerate(gradients):
            if gradient is not None:
                step.arrive(slot, gradient, is_gradient=False)
        step.launch_all(1.0)
        while step.write_next():
            pass
        return step

    def step(self, gradients) -> list[torch.Tensor | None]:
        """One whole step; the reduced gradients."""
        step = self.send(self.begin(), gradients)
        results = [None if g is None else step.result(i) for i, g in enumerate(gradients)]
        assert not step.arrived
        step.check_everywhere()
        self.compressor._training.meter.finish()
        self.compressor.step += 1
        step.commit()
        return results

    def residuals(self) -> dict[str, torch.Tensor]:
        """By parameter; empty where there are none."""
        state = self.compressor.state_dict()
        return state["residuals"]["parameters"] if "residuals" in state else {}


def gradients(sizes, step, dtypes=()):
    generator = torch.Generator().manual_seed(step)
    dtypes = dtypes or [torch.float32] * len(sizes)
    values = [torch.randn(n, generator=generator) for n in sizes]
    return [v.to(d) for v, d in zip(values, dtypes, strict=True)]


def after(
    weights: Weights, error: float | None, gradient: float = 1.0, residual: float = 0.0
) -> tuple[Weights, dict[int, float]]:
    """A lone rank's weights after a step of these norms, and whether its residual is too large.

    error: relative, of the one part; None if nothing was measured.
    """
    measured = (0.0, 0.0) if error is None else (error, 1.0)
    figures = Figures.of([""], [weights.row(gradient**2, residual**2, {"": measured})])
    return weights.after(gradient**2, figures), dict(figures.outgrown)
