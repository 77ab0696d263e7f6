"""StagedCodec: a codec and its second stage, which encodes averages over ranks."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from hvd_adaptive import states
from hvd_adaptive.codec import Codec
from hvd_adaptive.exchange.second_stage import (
    LEAST_BITS,
    MOST_BITS,
    SecondStage,
    default_bits,
    make_second_stage,
)
from hvd_adaptive.settings import Settings


class StagedCodec(Codec):
    """A codec with a second stage, a codec of averages over ranks."""

    # QSGD, which encodes averages unless a scheme overrides second_codec; schemes/qsgd.py sets it.
    codec_of_averages: ClassVar[Callable[..., StagedCodec]]

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._second: SecondStage | None = None

    def second_codec(self, bits: int) -> StagedCodec:
        return self.codec_of_averages(bits=bits, norm="linf", **self._for_averages())

    def _for_averages(self) -> dict[str, Any]:
        """Return the keywords that a codec for averages shares with this one."""
        own = self.settings
        return {"bucket_size": own.bucket_size, "seed": own.seed, "checksum": own.checksum}

    def second_stage(self, ranks: int) -> SecondStage:
        """Return how the averages of ``ranks`` ranks travel (exchange/second_stage.py)."""
        bits = self.settings.second_stage_bits or default_bits(self, ranks)
        if self._second is None or self._second.bits != bits:
            self._second = make_second_stage(self, ranks, bits)
        elif self._second.ranks != ranks:
            self._second = dataclasses.replace(self._second, ranks=ranks)
        return self._second

    @abstractmethod
    def prepare_second_stages(self, ranks: int, labels: Sequence[str], step: int) -> None:
        """Make the second stages of parts before ``step``, at which new tables are fitted."""

    def second_due(self, step: int) -> bool:
        """Return whether new second stages are fitted at ``step``, whatever the schedule says."""
        return False

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed run needs: plain tensors and numbers."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned."""

    def _second_state(self) -> dict[str, Any]:
        """Return the state's entry of the second stage, if there is one besides this codec."""
        if self._second is None or self._second.codec is self:
            return {}
        codec: Any = self._second.codec
        return {"second_stage": {"bits": self._second.bits, "codec": codec.state_dict()}}

    def _loaded_second(self, state: dict[str, Any]) -> SecondStage | None:
        """Return the second stage of a state; it is kept if ranks still need its bits."""
        if "second_stage" not in state:
            return None
        saved, of = state["second_stage"], "state: second_stage"
        bits = states.whole(saved, "bits", LEAST_BITS, MOST_BITS, of)
        second = make_second_stage(self, 1, bits)
        codec: Any = second.codec
        codec.load_state_dict(states.entry(saved, "codec", of))
        return second
