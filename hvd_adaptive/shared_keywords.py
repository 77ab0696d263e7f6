"""Declare the types of the keywords that every scheme shares, for type checkers and editors.

``settings.Settings`` describes and checks them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypedDict

import torch

from hvd_adaptive.options import ScatterReduce, Tuning

Norm = Literal["l2", "linf"]
Statistics = Literal["histogram", "normal"]
Updates = Iterable[int] | Callable[[int], bool] | None


class Common(TypedDict, total=False):
    """Keywords of all schemes, except the two whose defaults differ between schemes."""

    exchange: Literal["allgather", "scatter_reduce", "hierarchical", "auto"] | ScatterReduce | None
    bucket_size: int
    warmup_steps: int
    parameter_bits: Mapping[str, int | None] | None
    seed: int
    min_numel: int
    tail: Literal["quantize", "full"]
    coding: Literal["fixed", "huffman", "elias"]
    scope: Literal["network", "tensor"]
    keep_zeros: bool
    schedule: Callable[[int], Mapping[str, Any] | None] | None
    grad_scaler: Any
    monitor: Any
    fusion_bytes: int
    tuning: Tuning
    process_set: Any
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None


class WithClip(Common, total=False):
    """Keywords of all schemes, except ``error_feedback``."""

    clip: float | None


class WithFeedback(Common, total=False):
    """Keywords of all schemes, except ``clip``."""

    error_feedback: float | Literal["auto"] | None


class Shared(WithClip, WithFeedback, total=False):
    """Keywords of all schemes."""
