"""Steps of a lone rank without Horovod: what it sends comes back to it."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from hvd_adaptive.exchange.exchange import AllgatherExchange, RankInfo
from hvd_adaptive.feedback_weight import Figures, Weights
from hvd_adaptive.layout import Member, build_layout
from hvd_adaptive.run.trip import Plan
from hvd_adaptive.run.unordered import UnorderedStep


class Echo:
    """Horovod of one rank: an allgather gives it back what it sent, and remembers it."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def allgather(self, payload: torch.Tensor, name: str) -> torch.Tensor:
        self.sent.append(payload)
        return payload

    def synchronize(self, handle: torch.Tensor) -> torch.Tensor:
        return handle


class OneRank:
    """A compressor and the gradients of members "a", "b", ... of these sizes. It stands in for
    the binding, too.

    place: rank and size that its residuals are told.
    """

    def __init__(self, compressor, sizes, dtypes=(), rank_info=(0, 1), fusion=None) -> None:
        self.compressor, self.settings = compressor, compressor.settings
        self.hvd, self.rank_info = Echo(), rank_info
        self.world = SimpleNamespace(
            rank=0,
            size=1,
            allgather=self.hvd.allgather,
            synchronize=self.hvd.synchronize,
            sends_directly=False,
        )
        self.exchange, self.name = AllgatherExchange(RankInfo(1, 0)), "test"
        dtypes = dtypes or [torch.float32] * len(sizes)
        members = [
            Member(chr(ord("a") + i), (size,), dtype, compressor.parts.label_of(chr(ord("a") + i)))
            for i, (size, dtype) in enumerate(zip(sizes, dtypes, strict=True))
        ]
        self.layout = build_layout(
            members,
            min_numel=self.settings.min_numel,
            bucket_size=self.settings.bucket_size,
            tail=self.settings.tail,
            most_coordinates=fusion or self.settings.fusion_bytes // 4,
        )

    def buffer(self, use, coordinates, dtype, device):
        return torch.full((coordinates,), 7.0, dtype=dtype)

    def plans(self, layout):
        return [Plan(4 * group.coordinates, 0, 1) for group in layout.groups]

    def begin(self, attempt: int = 0) -> UnorderedStep:
        """As the session makes a step."""
        residuals = self.compressor._training.residuals
        if residuals is not None:
            residuals.lay_out(self.layout, *self.rank_info)
        return UnorderedStep(self, self.layout, self.compressor.step, attempt, residuals)

    def send(self, step: UnorderedStep, gradients) -> UnorderedStep:
        """Gradients by slot arrive (None: is missing) and all groups leave."""
        for slot, gradient in enumerate(gradients):
            if gradient is not None:
                step.arrive(slot, gradient, is_gradient=False)
        step.launch_all(1.0)
        step.write_back()
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
    """Of one step, Gaussian."""
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
