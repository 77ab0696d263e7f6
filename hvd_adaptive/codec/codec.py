"""Define Codec: a quantiser, its payloads, and its second stage, which encodes averages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from hvd_adaptive import states
from hvd_adaptive.adapt.schedule import UpdateSchedule
from hvd_adaptive.codec.payloads import Payloads
from hvd_adaptive.codec.quantizer import Quantizer
from hvd_adaptive.codec.second_stage import (
    LEAST_BITS,
    MOST_BITS,
    SecondStage,
    default_bits,
    make_second_stage,
)
from hvd_adaptive.settings import Settings


class Codec(Quantizer):
    """A quantiser with a second stage, a codec of averages over ranks.

    Attributes:
        payloads: What encodes and decodes payloads of this quantiser.
        adaptation: How the codec is fitted to gradients (adapt/statistics.py); None if it never is.
    """

    # Codec of QSGD, which encodes averages unless second_codec is overridden; qsgd.py sets it.
    codec_of_averages: ClassVar[Callable[..., Codec]]
    adaptation: Any = None

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.second: SecondStage | None = None
        self.payloads = Payloads(self)

    def second_codec(self, bits: int) -> Codec:
        return self.codec_of_averages(bits=bits, norm="linf", **self._for_averages())

    def _for_averages(self) -> dict[str, Any]:
        """Return the keywords that a codec for averages shares with this one."""
        own = self.settings
        names = ("bucket_size", "seed", "tuning", "keep_zeros")
        return {name: getattr(own, name) for name in names}

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
        """Continue the tables of ``old``, the codec that this one replaces.

        Args:
            old: A codec of the same scheme with other settings.
            keep: Keep fitted tables, because nothing that they are fitted to has changed.
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

    def tables_in(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Return a function that loads what ``tables_state`` returned.

        Raises:
            ValueError: The state is incomplete or does not fit.
        """
        second = self._loaded_second(state)

        def load() -> None:
            self.second = second

        return load

    def _loaded_second(self, state: Mapping[str, Any]) -> SecondStage | None:
        """Return the second stage of a state; it is kept if ranks still need its bits."""
        if "second_stage" not in state:
            return None
        saved, of = state["second_stage"], "state: second_stage"
        bits = states.whole(saved, "bits", LEAST_BITS, MOST_BITS, of)
        second = make_second_stage(self, 1, bits)
        codec: Any = second.codec
        load_state(codec, states.entry(saved, "codec", of))
        return second


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
    codec.tables_in(state)()


def check_scheme(state: Any, name: str) -> None:
    """Raise ValueError unless ``state`` is of the scheme ``name``."""
    if states.mapping(state).get("scheme") != name:
        raise ValueError(f"state: is of scheme {state.get('scheme')!r}, not {name!r}")
