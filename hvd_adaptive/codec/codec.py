"""Define Codec: a quantiser, its payloads, and its second stage, which encodes averages; and
FittedCodec, the base of those that are fitted to gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hvd_adaptive import states
from hvd_adaptive.adapt.coverage import GROWTH, Coverage, Usable
from hvd_adaptive.adapt.schedule import UpdateSchedule
from hvd_adaptive.adapt.statistics import Adaptation
from hvd_adaptive.base.tensors import HOST, check_supported
from hvd_adaptive.codec.payloads import Payloads
from hvd_adaptive.codec.quantizer import Quantizer
from hvd_adaptive.codec.second_stage import (
    LEAST_BITS,
    MOST_BITS,
    SecondStage,
    default_bits,
    make_second_stage,
)
from hvd_adaptive.coding.zeros import Zeros
from hvd_adaptive.settings import Settings


class Codec(Quantizer):
    """A quantiser with a second stage, a codec of averages over ranks."""

    adaptation: Any = None  # how it is fitted to gradients (adapt/statistics.py), if it is
    is_fitted = False  # whether a fit changes anything

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.second: SecondStage | None = None
        self.payloads = Payloads(self)

    def _for_averages(self) -> dict[str, Any]:
        """Return the keywords that a codec for averages shares with this one."""
        names = ("bucket_size", "seed", "tuning", "keep_zeros")
        return {name: getattr(self.settings, name) for name in names}

    def second_stage(self, ranks: int) -> SecondStage:
        """Return how the averages of ``ranks`` ranks travel (codec/second_stage.py)."""
        bits = self.settings.second_stage_bits or default_bits(self, ranks)
        if self.second is None or self.second.bits != bits:
            self.second = make_second_stage(self, ranks, bits)
        elif self.second.ranks != ranks:
            self.second = dataclasses.replace(self.second, ranks=ranks)
        return self.second

    @property
    def fitted_second(self) -> Any:
        """Return the codec of averages if it is fitted with this one's table; None otherwise."""
        return None

    def load_tables_from(self, old: Any, keep: bool) -> None:
        """Continue the tables of ``old``, a codec of the same scheme with other settings; ``keep``
        fitted tables, because nothing that they are fitted to has changed.
        """
        if keep and old.second is not None and old.second.codec is not old:
            self.second = make_second_stage(self, old.second.ranks, old.second.bits)
            second: Any = self.second.codec
            second.load_tables_from(old.second.codec, keep)

    # States of codecs have the entries that states of compressors had in their first format.

    def tables_state(self) -> dict[str, Any]:
        """Return the tables that a resumed run needs: plain tensors and numbers."""
        if self.second is None or self.second.codec is self:
            return {}
        codec: Any = self.second.codec
        return {"second_stage": {"bits": self.second.bits, "codec": state_of(codec)}}

    def tables_in(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the attributes that ``tables_state`` has saved, for ``vars(codec).update``; raise
        ValueError if the state is incomplete or does not fit.
        """
        if "second_stage" not in state:
            return {"second": None}
        saved, of = state["second_stage"], "state: second_stage"
        bits = states.whole(saved, "bits", LEAST_BITS, MOST_BITS, of)
        second = make_second_stage(self, 1, bits)  # it is kept if ranks still need its bits
        codec: Any = second.codec
        load_state(codec, states.entry(saved, "codec", of))
        return {"second": second}


class FittedCodec(Codec):
    """Base of codecs that are fitted to gradients, by ``adapt.joint_update.JointUpdate``.

    A codec implements ``collect``, which returns statistics of sampled buckets; ``joined``, which
    joins those of several steps of this rank, the last of which is this step, in one vector of a
    fixed length; ``refit``, which returns the update for all ranks' statistics; ``apply_update``,
    which applies it (``part`` is named in the log), and returns whether it need not be repeated
    soon; and ``refit_second`` if it is a codec of averages. Buckets are divided by their ``norm``,
    "l2" or "linf".
    """

    adaptation: Adaptation
    is_fitted = True
    norm: str = "l2"
    _share = 0.0  # Coverage.share of the last fit; 0 after none, or if it failed

    def has_more(self, collected: Sequence[np.ndarray]) -> bool:
        """Return whether these statistics contain notably more than those of the last fit."""
        return Coverage.of(collected).share > GROWTH * self._share

    def _usable(self, buckets: Sequence[torch.Tensor]) -> Usable:
        """Return the usable buckets, clipped if the settings say so."""
        return Usable.among(buckets, self.norm, self._clipped, self.leaves_zeros_out)

    def _usable_in(self, buckets: Sequence[torch.Tensor]) -> Usable:
        """Return ``_usable`` buckets; raise ValueError if there is none."""
        usable = self._usable(buckets)
        if not usable.buckets:
            raise ValueError("gradients: no bucket is finite and different from zero")
        return usable


def buckets_of(
    gradients: torch.Tensor | Sequence[torch.Tensor],
    settings: Settings,
    without_zeros: bool = False,
) -> list[torch.Tensor]:
    """Return the buckets (float32, 1-D) that ``encode`` would cut from gradients laid end to end;
    raise ValueError if they are neither a tensor nor a list of tensors.

    The partial bucket at the end is included unless ``tail="full"``; if no whole bucket exists, in
    any case. Zeros are left out if ``without_zeros`` (coding/zeros.py).
    """
    tensors = [gradients] if isinstance(gradients, torch.Tensor) else gradients
    if not isinstance(tensors, list | tuple) or not all(map(torch.is_tensor, tensors)):
        raise ValueError(
            f"gradients: must be a tensor or a list of tensors, not {type(gradients).__name__}"
        )
    for tensor in tensors:
        check_supported(tensor.device)
    flats = [g.detach().resolve_neg().reshape(-1).to(torch.float32) for g in tensors]
    flat = torch.cat(flats) if flats else torch.empty(0, **HOST)
    zeros = Zeros.of(flat) if without_zeros else None
    if zeros is not None:
        flat = zeros.others_of(flat)
    if not flat.numel():
        return []
    quantized = settings.quantized_part(flat.numel()) or flat.numel()
    return list(flat[:quantized].split(settings.bucket_size))


def state_of(codec: Codec) -> dict[str, Any]:
    """Return the state of a part's or second stage's codec."""
    state = {"scheme": codec.name, "step": 0, "encodes": 0} | codec.tables_state()
    if codec.adaptation is not None:
        state["schedule"] = UpdateSchedule(()).state_dict()
    return state


def load_state(codec: Codec, state: Any) -> None:
    """Load what ``state_of`` returned; raise ValueError if it does not fit."""
    check_scheme(state, codec.name)
    for entry in ("step", "encodes"):
        states.whole(state, entry)
    if codec.adaptation is not None:
        UpdateSchedule.checked(states.entry(state, "schedule"))
    vars(codec).update(codec.tables_in(state))


def check_scheme(state: Any, name: str) -> None:
    """Raise ValueError unless ``state`` is of the scheme ``name``."""
    if states.mapping(state).get("scheme") != name:
        raise ValueError(f"state: is of scheme {state.get('scheme')!r}, not {name!r}")
