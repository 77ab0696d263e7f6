"""Calls that type checkers must accept or refuse. `mypy` reads this file; nothing runs it.

An ignored error that mypy does not find is an error itself (warn_unused_ignores in setup.cfg).
"""

from __future__ import annotations

import torch

from hvd_adaptive import (
    ALQ,
    AMQ,
    ECDQ,
    EDEN,
    ORQ,
    QCS,
    QSGD,
    Auto,
    BinGrad,
    Hierarchical,
    LinearQuantile,
    LocalSGD,
    OneBitSGD,
    ScatterReduce,
    TernGrad,
    Tuning,
    average,
)
from hvd_adaptive.ddp import CompressionState


def right() -> None:
    """Keywords of schemes, and those that all share."""
    ALQ(bits=3, norm="linf", exchange="scatter_reduce", error_feedback="auto", clip=2.5)
    AMQ(bits=4, update_steps=lambda step: step % 100 == 0, parameter_bits={"*bias": None})
    QSGD(intervals=5, coding="elias", schedule=lambda step: {"bits": 4} if step > 9 else None)
    EDEN(bits=0.5, bucket_size=1024, keep_zeros=True)
    ECDQ(relative_variance=0.1, tail="full")
    QCS(gain=10, estimator="mmse")
    TernGrad(clip=None, error_feedback=0.5)
    OneBitSGD(error_feedback=None, clip=3.0)
    BinGrad(variant="biased", scope="network")
    ALQ(exchange=ScatterReduce(second_stage_bits=4), tuning=Tuning(worker=False))
    QSGD(exchange=Hierarchical(ranks_per_node=8, second_stage_bits=None))
    EDEN(exchange=Auto())
    ORQ(solver="coordinate_descent", level_dtype="float16")
    LinearQuantile(levels=5, level_dtype="float16")


def right_averages(module: torch.nn.Module) -> None:
    """Types of results."""
    scheme, gradients = ALQ(), [p.grad for p in module.parameters()]
    whole: list[torch.Tensor] = average([torch.ones(3)], scheme)
    some: list[torch.Tensor | None] = average(gradients, scheme)
    later: list[torch.Tensor | None] = average(gradients, scheme, async_op=True).wait()
    whole[0] + torch.ones(3)
    print(some, later)
    LocalSGD(torch.optim.SGD(module.parameters()), every=4, on_nonfinite="skip")


def wrong() -> None:
    """Misspelt keywords, and values that are not allowed."""
    ALQ(bitz=3)  # type: ignore[call-arg]
    ALQ(norm="l7")  # type: ignore[arg-type]
    ALQ(exchange="allreduce")  # type: ignore[arg-type]
    ALQ(bits="3")  # type: ignore[arg-type]
    ALQ(solver="newton")  # type: ignore[arg-type]
    ALQ(statistics="mean")  # type: ignore[arg-type]
    AMQ(coding="gzip")  # type: ignore[arg-type]
    QSGD(error_feedback="yes")  # type: ignore[arg-type]
    EDEN(tail="drop")  # type: ignore[arg-type]
    ECDQ(scope="layer")  # type: ignore[arg-type]
    QCS(estimator="map")  # type: ignore[arg-type]
    TernGrad(clipping=2.5)  # type: ignore[call-arg]
    OneBitSGD(momentum=0.9)  # type: ignore[call-arg]
    BinGrad(variant="half")  # type: ignore[arg-type]
    ALQ(second_stage_bits=4)  # type: ignore[call-arg]
    ALQ(worker=False)  # type: ignore[call-arg]
    ALQ(tuning=ScatterReduce())  # type: ignore[arg-type]
    ALQ(exchange=Tuning())  # type: ignore[arg-type]
    ScatterReduce(second_stage_bits="4")  # type: ignore[arg-type]
    Tuning(in_flight_byte=4096)  # type: ignore[call-arg]
    ALQ(3)  # type: ignore[call-arg]
    ORQ(solver="exact")  # type: ignore[arg-type]
    ORQ(level_dtype="float64")  # type: ignore[arg-type]
    LinearQuantile(level_dtype="int8")  # type: ignore[arg-type]
    OneBitSGD(error_feedback="yes")  # type: ignore[arg-type]


def wrong_averages(module: torch.nn.Module) -> None:
    """Wrong uses of results."""
    gradients = [p.grad for p in module.parameters()]
    whole: list[torch.Tensor] = average(gradients, ALQ())  # type: ignore[arg-type]
    print(whole)
    average([torch.ones(3)], ALQ()).wait()  # type: ignore[attr-defined]
    CompressionState(ALQ()).compress(torch.ones(3))  # type: ignore[attr-defined]
    average(torch.ones(3), ALQ(), blocking=True)  # type: ignore[call-overload]
    LocalSGD(torch.optim.SGD([]), every=4, on_nonfinite="stop")  # type: ignore[arg-type]
