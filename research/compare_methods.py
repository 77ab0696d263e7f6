"""Methods of compare.py, each by its name on the page of results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hvd_adaptive import ALQ, AMQ, NUQSGD, QSGD, TernGrad
from hvd_adaptive.compressor import GradientCompressor


@dataclass(frozen=True)
class Method:
    """make: a compressor from keywords; None for float32. workers: where fixed.
    adaptive: its table follows the gradients, and update_steps are given too.
    own: keywords that settle how many bits travel, in place of bits, and others; a mapping as a
    value gives one for each task. rate: the task's learning rate is multiplied by it."""

    make: Callable[..., GradientCompressor] | None = None
    workers: int | None = None
    adaptive: bool = False
    own: Mapping[str, Any] | None = None
    rate: float = 1.0

    def keywords(self, task: str) -> dict[str, Any] | None:
        """``own`` for one task."""
        if self.own is None:
            return None
        return {k: v[task] if isinstance(v, Mapping) else v for k, v in self.own.items()}

    def compressor(
        self, task: str, bits: int, bucket_size: int, seed: int, steps: int, clip: float | None
    ) -> GradientCompressor | None:
        """Ready for a run of ``steps``; None for float32. clip: None for the scheme's own."""
        if self.make is None:
            return None
        chosen: dict[str, Any] = {"bucket_size": bucket_size, "seed": seed, "keep_zeros": False}
        chosen |= {"bits": bits} if self.own is None else self.keywords(task)
        if clip is not None:
            chosen["clip"] = clip
        if self.adaptive:
            chosen["update_steps"] = update_steps(steps)
        return self.make(**chosen)


def update_steps(steps: int) -> list[int]:
    """When tables are refitted: at the start, soon after, and after each cut of the rate, as the
    ALQ paper's 100, 2,000, 10,000, ... of 80,000 do."""
    return sorted({0, steps // 24, steps // 6, 9 * steps // 16 + 1, 3 * steps // 4 + 1})


def _adaptive(make: Callable[..., GradientCompressor], **keywords: Any) -> Method:
    return Method(functools.partial(make, **keywords), adaptive=True)


# The ALQ paper's form of its adaptive methods, which is not the package's default.
PAPER: dict[str, Any] = {"norm": "l2", "symmetric": True}
# The ALQ paper's.
METHODS = {
    "SGD": Method(workers=1),
    "SuperSGD": Method(),
    "QSGD": Method(QSGD),
    # The two as that paper runs them: 2**bits levels without zero.
    "QSGDinf": Method(functools.partial(QSGD, norm="linf", symmetric=True)),
    "NUQSGD": Method(functools.partial(NUQSGD, symmetric=True)),
    "TernGrad": Method(lambda bits, **shared: TernGrad(**shared)),
    "ALQ": _adaptive(ALQ, **PAPER),
    "ALQ-N": _adaptive(ALQ, **PAPER, normalized=True),
    "ALQG": _adaptive(ALQ, **PAPER, solver="gradient_descent"),
    "ALQG-N": _adaptive(ALQ, **PAPER, solver="gradient_descent", normalized=True),
    "AMQ": _adaptive(AMQ, **PAPER),
    "AMQ-N": _adaptive(AMQ, **PAPER, normalized=True),
}
FLOAT32 = ("SGD", "SuperSGD")
FIXED = ("QSGD", "QSGDinf", "NUQSGD", "TernGrad")
ADAPTIVE = tuple(name for name, method in METHODS.items() if method.adaptive)
