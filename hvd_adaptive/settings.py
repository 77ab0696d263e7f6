"""Keywords that every scheme shares, and checks that name argument, value and allowed."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from hvd_adaptive.coding.header import CODINGS

EXCHANGES = ("allgather", "scatter_reduce", "hierarchical", "auto")
SECOND_STAGE_BITS = (*range(2, 9), 32)


def check_integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    """``value`` as an int in [least, most]; ValueError otherwise."""
    allowed = f">= {least}" if most is None else f"from {least} to {most}"
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):
        raise ValueError(f"{name}={value!r}: must be an integer {allowed}")
    return int(value)


def check_choice(name: str, value: Any, allowed: Collection[str]) -> str:
    """``value`` if it is one of ``allowed``; ValueError otherwise."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, allowed))}")
    return value


def check_flag(name: str, value: Any) -> bool:
    """``value`` if it is a bool; ValueError otherwise."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: must be True or False")
    return value


def check_clip(value: Any) -> float | None:
    """``value`` as a positive finite float, or None; ValueError otherwise."""
    if value is None:
        return None
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not 0 < value < float("inf"):
        raise ValueError(f"clip={value!r}: must be a number above 0, or None")
    return float(value)


def check_feedback(value: Any) -> float | None:
    """``value`` as a float in (0, 1], or None; ValueError otherwise."""
    if value is None:
        return None
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not 0 < value <= 1:
        raise ValueError(
            f"error_feedback={value!r}: must be a number above 0 and at most 1, or None"
        )
    return float(value)


def check_second_stage(value: Any) -> int | None:
    """``value`` as an int from 2 to 8, 32, or None; ValueError otherwise."""
    if value is None:
        return None
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or value not in SECOND_STAGE_BITS:
        raise ValueError(
            f"second_stage_bits={value!r}: must be an integer from 2 to 8, 32 for full precision, "
            "or None"
        )
    return int(value)


def check_parameter_bits(value: Any) -> dict[str, int | None] | None:
    """A plain copy, its order kept, so that equal mappings look alike; None for an empty one.
    ValueError unless it is a mapping of strings to integers >= 1 and None."""
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(
            f"parameter_bits={value!r}: must be a mapping of name patterns to bits or None"
        )
    checked = {}
    for pattern, bits in value.items():
        whole = isinstance(bits, numbers.Integral) and not isinstance(bits, bool)
        if bits is not None and not (whole and bits >= 1):
            raise ValueError(
                f"parameter_bits[{pattern!r}]={bits!r}: must be an integer >= 1, or None for full "
                "precision"
            )
        checked[str(pattern)] = None if bits is None else int(bits)
    return checked or None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Shared keywords of all compressors (defaults as a user sees them).

    bucket_size: coordinates that share one scale; any integer >= 1.
    seed: of the private random numbers; equal seeds repeat a run bit for bit. Each compressor of a
        process draws its own (instances.py).
    min_numel: smaller tensors travel in full precision inside the payload.
    tail: a group's last, partial bucket is quantised ("quantize") or sent as it is ("full").
    coding: how a level table's codes become bits: packed ("fixed"), or by a lossless coder
        ("huffman": by a book that is fitted with the table; "elias": for tables with a zero, by the
        distances between nonzero coordinates). A payload that a coder would not make shorter is
        packed.
    exchange: how payloads travel: "allgather", each to every rank, for few ranks; or
        "scatter_reduce", where each rank averages a part for all, and averages travel again;
        "hierarchical", in full precision between ranks of a node and compressed between nodes; or
        "auto", what is measured to be fastest for each group, float32 and bfloat16 included.
    second_stage_bits: of averages that travel again, 2 to 8, or 32 for full precision; where None,
        the fewest that add at most a quarter of the first stage's variance where coordinates are
        normal or Laplacian, or 32 if the first stage loses nothing.
    ranks_per_node: of exchange="hierarchical", ranks that follow each other; found out where None.
    error_feedback: weight β of what earlier steps' quantisation lost, added to each gradient before
        it is quantised (feedback.Residuals): above 0, at most 1, the classical one. (Above 1 no
        bound of the QCS paper's Lemma 4 gets better.) None for none. An unbiased quantiser of
        relative error γ needs β < 2/(1 + γ); 1/(1 + γ) keeps residuals smallest.
    clip: c; coordinates beyond c deviations of their bucket are cut back to that before it is
        quantised (ALQ paper, Eq. 49); unbiased only for the clipped gradient. None for none.
    scope: one level table for the whole network ("network"), or one for each tensor ("tensor":
        layer-wise quantisation, ALQ paper, App. K.2), whose buckets then end with it.
    parameter_bits: {name pattern: bits}, for parameters that need others than the rest (the QSGD
        paper finds convolutions more sensitive than dense layers). The first pattern that matches
        a parameter's whole name (fnmatch, case counts) holds; None sends it in full precision.
        min_numel is asked as well. Parameters of the same bits share a table.
    fusion_bytes: gradient bytes (as float32) of one group at most.
    in_flight_bytes: bytes of payloads, its own and received ones, that a rank holds at a time at
        most.
    checksum: payloads carry one of all their bytes, which receivers compare: a corrupt payload is
        told, and never averaged. Where False what no decoder trips over becomes wrong numbers.
    warmup_steps: first steps whose gradients travel in full precision.
    schedule: a function of the step that gives settings to change from that step on, as a dict of
        keywords for ``set``, or None; asked once a step. The same on every rank.
    grad_scaler: AMP's torch.amp.GradScaler (anything with ``get_scale()``), for error feedback:
        residuals survive changes of its loss scale. Gradients must travel before they are unscaled:
        ``optimizer.synchronize()`` comes before ``scaler.unscale_(optimizer)``.
    monitor: a hvd_adaptive.Monitor, which records what is sent and how good it is, or None; ranks
        may differ in it.
    process_set: Horovod process set; found from the optimizer where None.
    named_parameters: used where no optimizer can be found.
    """

    bucket_size: int = 8192
    seed: int = 0
    min_numel: int = 1024
    tail: str = "quantize"
    coding: str = "fixed"
    exchange: str = "allgather"
    second_stage_bits: int | None = None
    ranks_per_node: int | None = None
    error_feedback: float | None = None
    clip: float | None = None
    scope: str = "network"
    parameter_bits: Mapping[str, int | None] | None = None
    fusion_bytes: int = 16 * 2**20
    in_flight_bytes: int = 512 * 2**20
    checksum: bool = True
    warmup_steps: int = 0
    schedule: Callable[[int], Mapping[str, Any] | None] | None = None
    grad_scaler: Any = None
    monitor: Any = None
    process_set: Any = None
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None

    def __post_init__(self) -> None:
        checked = {
            "bucket_size": check_integer("bucket_size", self.bucket_size, 1, 2**32 - 1),
            "seed": check_integer("seed", self.seed, 0, 2**64 - 1),
            "min_numel": check_integer("min_numel", self.min_numel, 0),
            "tail": check_choice("tail", self.tail, ("quantize", "full")),
            "coding": check_choice("coding", self.coding, CODINGS),
            "exchange": check_choice("exchange", self.exchange, EXCHANGES),
            "second_stage_bits": check_second_stage(self.second_stage_bits),
            "ranks_per_node": None
            if self.ranks_per_node is None
            else check_integer("ranks_per_node", self.ranks_per_node, 1),
            "error_feedback": check_feedback(self.error_feedback),
            "clip": check_clip(self.clip),
            "scope": check_choice("scope", self.scope, ("network", "tensor")),
            "parameter_bits": check_parameter_bits(self.parameter_bits),
            "fusion_bytes": check_integer("fusion_bytes", self.fusion_bytes, 4),
            "in_flight_bytes": check_integer("in_flight_bytes", self.in_flight_bytes, 4096),
            "checksum": check_flag("checksum", self.checksum),
            "warmup_steps": check_integer("warmup_steps", self.warmup_steps, 0),
        }
        if self.exchange == "hierarchical" and self.error_feedback is not None:
            raise ValueError(
                f"error_feedback={self.error_feedback!r}: must be None with "
                "exchange='hierarchical', where nodes' averages are quantised, not ranks' gradients"
            )
        if self.grad_scaler is not None and not callable(
            getattr(self.grad_scaler, "get_scale", None)
        ):
            raise ValueError(
                f"grad_scaler={self.grad_scaler!r}: must be a torch.amp.GradScaler, or None"
            )
        if self.monitor is not None and not callable(getattr(self.monitor, "watches", None)):
            raise ValueError(f"monitor={self.monitor!r}: must be a hvd_adaptive.Monitor, or None")
        if self.schedule is not None and not callable(self.schedule):
            raise ValueError(f"schedule={self.schedule!r}: must be a function of the step, or None")
        if self.named_parameters is not None:
            checked["named_parameters"] = _checked(self.named_parameters)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_keywords(cls, scheme: str, keywords: dict[str, Any]) -> Settings:
        """Settings from a constructor's remaining keywords; TypeError names an unknown one."""
        known = [field.name for field in fields(cls)]
        for name in keywords:
            if name not in known:
                raise TypeError(
                    f"{scheme}() has no keyword {name!r}; shared keywords are {', '.join(known)}"
                )
        return cls(**keywords)

    def shared(self) -> dict[str, Any]:
        """The settings that all ranks must have alike."""
        local = ("process_set", "named_parameters", "schedule", "grad_scaler", "monitor")
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in local}

    def quantized_part(self, coordinates: int) -> int:
        """How many of ``coordinates`` are quantised; the rest is the full-precision tail."""
        if self.tail == "full":
            return coordinates - coordinates % self.bucket_size
        return coordinates


def _checked(named: Any) -> list[tuple[str, torch.nn.Parameter]]:
    pairs = list(named)
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise ValueError(
                f"named_parameters: must hold (name, parameter) pairs as "
                f"model.named_parameters() gives them, not {type(pair).__name__}"
            )
    return pairs
