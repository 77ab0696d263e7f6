"""Define the keywords that every scheme shares, and declare their types."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypedDict

import torch

from hvd_adaptive.base.checks import (
    check_choice,
    check_flag,
    check_has,
    check_integer,
    check_named_parameters,
    check_number,
    check_parameter_bits,
)
from hvd_adaptive.coding import CODINGS
from hvd_adaptive.keywords import (
    OTHER,
    SCHEMES_OWN,
    Checked,
    Keyword,
    declared,
    keyword,
    unknown_keyword,
)
from hvd_adaptive.options import INSIDE, ScatterReduce, Tuning, check_exchange, check_tuning

# Properties of keywords that belong to one process.
LOCAL = {"agreed": False, "changeable": False, "for_parts": False}


def check_feedback(name: str, value: Any) -> float | str | None:
    """Return a weight of error feedback, or raise ValueError."""
    if isinstance(value, str) and value == "auto":
        return value
    allowed = "a number above 0 and at most 1, 'auto'"
    return check_number(name, value, allowed, lambda weight: 0 < weight <= 1)


@dataclass(frozen=True, kw_only=True, repr=False)
class Settings(Checked):
    """Shared keywords of all compressors, with their defaults.

    Attributes:
        exchange: How payloads become averages. "allgather" sends each payload to every rank, for
            few ranks. In "scatter_reduce" each rank averages one part for all, and averages are
            sent again. "hierarchical" uses full precision between ranks of a node and compresses
            between nodes. "auto" measures which is fastest for each group; it also tries float32
            and bfloat16. None stands for "allgather" up to 3 ranks and "scatter_reduce" beyond.
            Objects have settings of their own: ``ScatterReduce(second_stage_bits=4)``,
            ``Hierarchical(ranks_per_node=8)``, ``Auto(...)`` (hvd_adaptive.options).
        error_feedback: Weight β, above 0 and at most 1, of the error of earlier steps, which is
            added to each gradient before it is quantised (docs/choosing.md); 1 is the classical
            method, None disables it. An unbiased quantiser of relative error γ needs β < 2/(1 + γ),
            and 1/(1 + γ) keeps residuals smallest. "auto" follows this value: β of each part of
            the parameters is 1/(1 + measured error), the same on all ranks.
            Above 1 no bound of the QCS paper's Lemma 4 improves. Residuals that outgrow the
            gradients a hundredfold raise ResidualError on all ranks.
        bucket_size: Coordinates that share one scale.
        warmup_steps: Number of first steps whose gradients are sent in full precision.
        parameter_bits: {name pattern: bits} for parameters with other bits (the QSGD paper finds
            convolutions more sensitive than dense layers). The first pattern that matches a
            parameter's whole name (fnmatch, case-sensitive) applies; bits=None sends the parameter
            in full precision. min_numel applies, too. Parameters of the same bits share a table.
        seed: Seed of the private random numbers. Equal seeds repeat a run bit for bit. Each
            compressor of a process draws numbers of its own.
        min_numel: Tensors with fewer elements are sent in full precision, inside the payload.
        tail: "quantize" quantises a group's last, partial bucket; "full" sends it in full
            precision.
        coding: How codes become bits. "fixed" packs them. "huffman" uses a code book that is fitted
            with the level table; "elias" codes the distances between nonzero coordinates, for
            tables with a zero. Both are lossless, and a payload that they would not shorten is
            packed.
        clip: c; coordinates beyond c standard deviations of their bucket are clipped before it is
            quantised (ALQ paper, Eq. 49). The estimate is unbiased only for the clipped gradient.
            None disables clipping.
        scope: "network" uses one level table for the whole network. "tensor" uses one for each
            tensor (layer-wise quantisation, ALQ paper, App. K.2), and buckets end with the tensor.
        keep_zeros: A coordinate that is exactly zero on every rank is exactly zero in the average.
            Schemes whose levels contain 0 do this in any case. If True, payloads of the others say
            which coordinates are zero, in at most a bit for each and 24 bytes, and encode the
            coordinates that are not; a payload without zeros does not change. If False, zeros are
            rounded to the nearest levels.
        schedule: Function of the step that returns a dict of keywords for ``set``, which apply from
            that step on, or None. It is called once a step, and must return the same on all ranks.
        grad_scaler: torch.amp.GradScaler (any object with ``get_scale()``), for error feedback, so
            that residuals follow changes of its loss scale. Gradients must be exchanged before they
            are unscaled: call ``optimizer.synchronize()`` before ``scaler.unscale_(optimizer)``.
        monitor: hvd_adaptive.Monitor that records what is sent and its error, or None. It may
            differ between ranks.
        fusion_bytes: Maximum gradient bytes (as float32) of a group.
        tuning: ``Tuning(...)``: memory in flight, checksums and the worker thread
            (hvd_adaptive.options).
        process_set: Horovod process set. It is found if Horovod's optimizer or ``hvd.allreduce``
            calls; it must then be None or the same.
        named_parameters: Used if no optimizer can be found.

    Raises:
        ValueError: A value is not allowed.

    Examples:
        >>> from hvd_adaptive import EDEN
        >>> compressor = EDEN(bits=2, parameter_bits={"*.bias": None}, seed=1)
        >>> compressor.settings.seed
        1
    """

    exchange: str | ScatterReduce | None = keyword(None, check_exchange, for_averages=False)
    error_feedback: float | str | None = keyword(
        None, check_feedback, refits=True, for_averages=False
    )
    bucket_size: int = keyword(8192, partial(check_integer, least=1, most=2**32 - 1), refits=True)
    warmup_steps: int = keyword(0, partial(check_integer, least=0))
    parameter_bits: Mapping[str, int | None] | None = keyword(
        None, check_parameter_bits, refits=True, for_parts=False
    )
    seed: int = keyword(0, partial(check_integer, least=0, most=2**64 - 1))
    min_numel: int = keyword(1024, partial(check_integer, least=0))
    tail: str = keyword("quantize", partial(check_choice, allowed=("quantize", "full")))
    coding: str = keyword("fixed", partial(check_choice, allowed=CODINGS), refits=True)
    clip: float | None = keyword(
        None,
        partial(check_number, allowed="a number above 0", is_allowed=lambda c: 0 < c < math.inf),
        refits=True,
    )
    scope: str = keyword(
        "network",
        partial(check_choice, allowed=("network", "tensor")),
        refits=True,
        for_parts=False,
    )
    keep_zeros: bool = keyword(False, check_flag, refits=True)
    schedule: Callable[[int], Mapping[str, Any] | None] | None = keyword(
        None, partial(check_has, method="__call__", allowed="a function of the step"), **LOCAL
    )
    grad_scaler: Any = keyword(
        None,
        partial(check_has, method="get_scale", allowed="a torch.amp.GradScaler"),
        **LOCAL,
        picklable=False,
    )
    monitor: Any = keyword(
        None,
        partial(check_has, method="watches", allowed="a hvd_adaptive.Monitor"),
        **LOCAL,
        picklable=False,
    )
    fusion_bytes: int = keyword(16 * 2**20, partial(check_integer, least=4))
    tuning: Tuning = keyword(Tuning(), check_tuning)
    process_set: Any = keyword(
        None,
        partial(check_has, method="included", allowed="a process set of Horovod (hvd.ProcessSet)"),
        **LOCAL,
        picklable=False,
    )
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = keyword(
        None, check_named_parameters, **LOCAL, picklable=False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exchange_name == "hierarchical" and self.error_feedback is not None:
            raise ValueError(
                f"error_feedback={self.error_feedback!r}: must be None with "
                "exchange='hierarchical', where nodes' averages are quantised, not ranks' gradients"
            )

    @classmethod
    def from_keywords(cls, scheme: str | type, keywords: Mapping[str, Any]) -> Settings:
        """Return settings from a constructor's remaining keywords.

        Args:
            scheme: Class, or its name, for errors. Only a class's own keywords are listed in them.
            keywords: What the constructor has not used itself.

        Raises:
            TypeError: A keyword is unknown.
        """
        known = declared(cls)
        for name in keywords:
            if name not in known:
                raise unknown_keyword(scheme, name, known, INSIDE)
        return cls(**keywords)

    @property
    def exchange_name(self) -> str | None:
        """Return the exchange's name."""
        return self.exchange.name if isinstance(self.exchange, ScatterReduce) else self.exchange

    @property
    def second_stage_bits(self) -> int | None:
        """Return the exchange's ``second_stage_bits``."""
        return getattr(self.exchange, "second_stage_bits", None)

    @property
    def ranks_per_node(self) -> int | None:
        """Return the exchange's ``ranks_per_node``."""
        return getattr(self.exchange, "ranks_per_node", None)

    def quantized_part(self, coordinates: int) -> int:
        """Return how many of ``coordinates`` are quantised; the rest is the full-precision tail."""
        if self.tail == "full":
            return coordinates - coordinates % self.bucket_size
        return coordinates


KEYWORDS = declared(Settings) | SCHEMES_OWN
UNCHANGEABLE = tuple(name for name, properties in KEYWORDS.items() if not properties.changeable)


def keyword_of(name: str) -> Keyword:
    """Return the declaration of a keyword of any scheme."""
    return KEYWORDS.get(name, OTHER)


# Types of the keywords, for type checkers and editors.

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
