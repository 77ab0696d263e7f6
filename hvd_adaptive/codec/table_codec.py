"""Define LevelTable, and TableCodec, whose buckets share one: a body of scales and codes."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hvd_adaptive import kernels, states
from hvd_adaptive.codec.codec import Codec
from hvd_adaptive.codec.payloads import squares_of
from hvd_adaptive.coding.coders import CODERS, Coder
from hvd_adaptive.kernels.tables import KernelTable, kernel_table
from hvd_adaptive.levels import check_magnitudes
from hvd_adaptive.settings import Settings

MOST_BITS = 16  # of a code, including its sign


@dataclass(frozen=True, eq=False)
class LevelTable:
    """Levels shared by all ranks; invalid magnitudes or probabilities raise ValueError.

    Attributes:
        bits: Bits of a code, including the sign.
        symmetric: True for 2**(bits-1) positive magnitudes and their negatives (ALQ paper, App.
            B.3); False if the first magnitude is 0 (section 3).
        magnitudes: float64, ascending to 1. A zero-based table may have fewer than its bits allow.
        version: Number of fits.
        probabilities: float64, probability of each signed level in ascending order at the time of
            the fit (Props 6, 8); None if they were not needed.
    """

    bits: int
    symmetric: bool
    magnitudes: np.ndarray
    version: int = 0
    probabilities: np.ndarray | None = None

    def __post_init__(self) -> None:
        magnitudes = np.array(self.magnitudes, dtype=np.float64)
        object.__setattr__(self, "magnitudes", magnitudes)
        magnitudes.flags.writeable = False
        count = 1 << (self.bits - 1)
        if magnitudes.shape != (count,) and (self.symmetric or not 2 <= magnitudes.size <= count):
            raise ValueError(
                f"table: must have {count} magnitudes for bits={self.bits}, "
                f"not shape {tuple(magnitudes.shape)}"
            )
        check_magnitudes(magnitudes, self.symmetric, "table")
        check_magnitudes(magnitudes.astype(np.float32), self.symmetric, "table")  # as kernels do
        if self.probabilities is None:
            return
        p, count = np.array(self.probabilities, dtype=np.float64), len(self.levels)
        object.__setattr__(self, "probabilities", p)
        p.flags.writeable = False
        if p.shape != (count,) or not np.all((p >= 0) & np.isfinite(p)) or not p.sum() > 0:
            raise ValueError(
                f"table: probabilities must be {count} numbers, not negative, finite and not all "
                f"zero: {p.tolist()}"
            )

    @classmethod
    def from_levels(
        cls, levels: Sequence[float] | torch.Tensor, bits: int, symmetric: bool
    ) -> LevelTable:
        """Return the table of ascending signed levels; raise ValueError if they are invalid. They
        are symmetric up to the rounding of float32, as those of ``torch.linspace`` are.
        """
        try:
            values = np.array(torch.as_tensor(levels, dtype=torch.float64, device="cpu").tolist())
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(f"table: must be a list of numbers, not {levels!r}") from None
        if values.ndim != 1 or not np.all(np.isfinite(values)) or np.any(np.diff(values) <= 0):
            raise ValueError(f"table: must be a strictly increasing list of levels: {levels!r}")
        folded, rounding = values / 2 - values[::-1] / 2, 4 * np.finfo(np.float32).epsneg
        allowed = np.minimum(np.abs(folded) / 1024, rounding)  # a level may be tiny
        allowed[values.size // 2 : (values.size + 1) // 2] = rounding  # the middle one is zero
        if np.any(np.abs(values + values[::-1]) > allowed):
            raise ValueError(f"table: levels must be symmetric about zero: {values.tolist()}")
        return cls(bits, symmetric, folded[folded >= 0])

    @property
    def levels(self) -> torch.Tensor:
        """Return the distinct signed levels, ascending, float64."""
        positive = self.magnitudes[self.magnitudes > 0]
        zero = [] if self.symmetric else [0.0]
        return torch.from_numpy(np.concatenate([-positive[::-1], zero, positive]))

    @functools.cached_property
    def kernel(self) -> KernelTable:
        """Return the table in the form that the kernels read."""
        return kernel_table(self.magnitudes, self.symmetric)

    @functools.cached_property
    def fingerprint(self) -> int:
        """Return 32 bits that differ between tables."""
        return zlib.crc32(self.magnitudes.astype("<f8").tobytes(), int(self.symmetric))

    def state_dict(self) -> dict[str, Any]:
        """Return the table as plain tensors and numbers."""
        state = {
            "magnitudes": torch.from_numpy(self.magnitudes.copy()),
            "bits": self.bits,
            "symmetric": self.symmetric,
            "version": self.version,
        }
        if self.probabilities is not None:
            state["probabilities"] = torch.from_numpy(self.probabilities.copy())
        return state

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> LevelTable:
        """Return the table of a ``state_dict``; raise ValueError if it is invalid."""
        of = "state: table"
        magnitudes = states.numbers(state, "magnitudes", of)
        probabilities = None
        if "probabilities" in state:
            probabilities = states.numbers(state, "probabilities", of)
        bits = states.whole(state, "bits", 1, MOST_BITS, of)
        symmetric = states.flag(state, "symmetric", of)
        version = states.whole(state, "version", 0, states.MOST_VERSION, of)
        return cls(bits, symmetric, magnitudes, version, probabilities)


class TableCodec(Codec):
    """Codec that quantises buckets by their norm ("l2" or "linf") and one table of levels.

    The body holds one float32 scale for each bucket, then the codes' 32-bit words
    (kernels/packing.py). If ``coding`` names a coder and its stream (coding/coders.py) is shorter,
    the stream replaces the words.
    """

    codings = ("fixed", *CODERS)
    knows_errors = True

    def __init__(self, name: str, settings: Settings, norm: str, table: LevelTable) -> None:
        self.name, self.norm = name, norm
        self.table, self.has_zero = table, not table.symmetric
        super().__init__(settings)
        self._coder = table, self._coder_of(table)
        self._state: tuple[LevelTable | None, tuple[int, int, int]] = None, (0, 0, 0)

    @property
    def levels(self) -> torch.Tensor:
        """Return the ascending signed reconstruction levels in [-1, 1], float64."""
        return self.table.levels

    @property
    def alphabet(self) -> int:
        return self.table.kernel.alphabet

    @property
    def table_version(self) -> int:
        return self.table.version

    @property
    def table_fingerprint(self) -> int:
        table = self.table.fingerprint
        if self.coder is None or not self.coder.fingerprint:
            return table
        return zlib.crc32(self.coder.fingerprint.to_bytes(4, "little"), table)

    @property
    def table_state(self) -> tuple[int, int, int]:
        if self._state[0] is not self.table:
            self._state = self.table, super().table_state
        return self._state[1]

    @property
    def coder(self) -> Coder | None:
        if self._coder[0] is not self.table:
            self._coder = self.table, self._coder_of(self.table)
        return self._coder[1]

    def _coder_of(self, table: LevelTable) -> Coder | None:
        """Return the coder of ``coding``; None for "fixed", or before a first fit."""
        kind, known = CODERS.get(self.settings.coding), table.probabilities
        if kind is None or (kind.fitted and known is None):
            return None
        return kind(table.kernel.packing, self.settings.bucket_size, known)

    def codec_settings(self) -> dict[str, Any]:
        return {"norm": self.norm, "bits": self.table.bits, "symmetric": self.table.symmetric}

    def body_bytes(self, coordinates: int) -> int:
        return 4 * (self._buckets(coordinates) + self.table.kernel.packing.words(coordinates))

    def encode_body(self, flat: torch.Tensor, body: torch.Tensor, key: int) -> None:
        settings, count = self.settings, flat.numel()
        at = 4 * -(-count // settings.bucket_size)
        kernels.for_device(flat.device).encode(
            flat,
            body[:at].view(torch.float32),
            body[at:].view(torch.int32),
            max(1, min(settings.bucket_size, count)),
            self.norm,
            self.table.kernel,
            key,
            settings.clip,
        )

    def decode_bodies(
        self,
        bodies: Sequence[torch.Tensor],
        keys: Sequence[int],
        factor: float,
        out: torch.Tensor,
        add: bool = True,
    ) -> None:
        size, count, pairs = self.settings.bucket_size, out.numel(), []
        at, bucket = 4 * -(-count // size), max(1, min(size, count))
        for body in bodies:
            pairs.append((body[:at].view(torch.float32), body[at:].view(torch.int32)))
        decode = kernels.for_device(out.device).decode_add
        decode(pairs, bucket, self.table.kernel, factor, out, add)

    def expected_errors(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the variance of ALQ Eqs 1, 2, plus the loss by clipping."""
        bucket = max(1, min(self.settings.bucket_size, flat.numel()))
        clipped = flat if self.settings.clip is None else self._clipped(flat)
        ops = kernels.for_device(flat.device)
        found = ops.errors(clipped, bucket, self.norm, self.table.kernel)
        if clipped is not flat:
            found[:, 0] += squares_of(flat - clipped, bucket)
            found[:, 1] = squares_of(flat, bucket)
        return found
