"""Define DitheredCodec, ECDQ's: payloads of dithered integers, fits of their code, rate control."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hvd_adaptive import states
from hvd_adaptive.adapt.coverage import HEAD, Coverage, Usable, share_in
from hvd_adaptive.adapt.statistics import Adaptation, histograms
from hvd_adaptive.codec.codec import FittedCodec, buckets_of
from hvd_adaptive.codec.dithered_code import LEAST_DELTA, DitheredCode, RateControl, gaussian_code
from hvd_adaptive.coding.payload import Payload, padded
from hvd_adaptive.kernels import dithered
from hvd_adaptive.kernels.constants import BINS
from hvd_adaptive.levels import Histogram
from hvd_adaptive.settings import Settings

logger = logging.getLogger("hvd_adaptive")

# Bits per coordinate that must remain after the bits of the steps.
LEAST_CODED_BITS = 0.25
# Sizes of coordinates are sampled up to this many root mean squares, or up to the square root of
# the bucket size if that is less. Larger sizes count as this size.
LARGEST_UNIT = 256.0


class DitheredCodec(FittedCodec):
    """Codec with a fixed step ``delta`` in root mean squares, or rate control of ``bits``."""

    name = "ecdq"
    encodes_on_host = True

    def __init__(
        self, settings: Settings, bits: float | None, delta: float | None, adaptation: Adaptation
    ) -> None:
        super().__init__(settings)
        size = settings.bucket_size
        self.bits, self._delta = bits, delta
        self._side = 32 / size + 80 / dithered.SEGMENT
        if bits is not None and bits < self._side + LEAST_CODED_BITS:
            raise ValueError(
                f"bits={bits!r}: with bucket_size={size} the steps alone need {32 / size:.3g} bits "
                f"per coordinate; must be at least {LEAST_CODED_BITS} more"
            )
        self.adaptation = adaptation
        self._width = 2 if math.sqrt(size) / LEAST_DELTA < 2**15 - 8 else 4
        self._unit = min(2.0 ** math.ceil(math.log2(size) / 2), LARGEST_UNIT)
        self._fitted: DitheredCode | None = None
        self._proposed: DitheredCode | None = None  # by this rank, until all ranks use it
        self._version = 0
        self._modelled = 0.0  # expected bits of the current code when it was fitted
        self._control = RateControl(bits or 0.0)
        self._sent = np.zeros(2)  # bits and coordinates of this rank since the last update

    @property
    def code(self) -> DitheredCode:
        """Return the current step and code books."""
        if self._fitted is not None:
            return self._fitted
        return gaussian_code(None if self.bits is None else self.bits - self._side, self._delta)

    @property
    def delta(self) -> float:
        """Return δ, a bucket's step in units of its root mean square."""
        return self.code.delta

    @property
    def relative_variance(self) -> float:
        """Return E||Q(v) - v||² / ||v||² of every bucket, δ²/12."""
        return self.delta**2 / 12

    @property
    def alphabet(self) -> int:
        return self.code.probabilities.shape[1]

    @property
    def table_version(self) -> int:
        return self._version

    @property
    def table_fingerprint(self) -> int:
        return self.code.fingerprint

    def codec_settings(self) -> dict[str, Any]:
        variance = None if self._delta is None else self._delta**2 / 12
        return {"bits": self.bits, "relative_variance": variance}

    def scheme_settings(self) -> dict[str, Any]:
        return self.codec_settings() | {"samples": self.adaptation.samples}

    # Payloads -------------------------------------------------------------------------------------

    def body_bytes(self, coordinates: int) -> int:
        return dithered.most_bytes(coordinates, self._bucket(coordinates), self._width)

    def least_body_bytes(self, coordinates: int) -> int:
        return dithered.least_bytes(coordinates, self._bucket(coordinates), self._width)

    def encode_body(self, flat: torch.Tensor, body: torch.Tensor, key: int) -> int:
        bucket, values = self._bucket(flat.numel()), self._clipped(flat)
        return dithered.encode_body(values, bucket, self.code, key, self._width, body)

    def add_bodies(
        self, bodies: Sequence[torch.Tensor], keys: Sequence[int], factor: float, out: torch.Tensor
    ) -> None:
        bucket = self._bucket(out.numel())
        dithered.add_bodies(bodies, bucket, self.code, keys, self._width, out)
        if factor != 1.0:
            out *= factor

    def body_roundtrip(self, flat: torch.Tensor, key: int) -> torch.Tensor:
        """Return the decoded gradient without the coder, which is lossless."""
        bucket = self._bucket(flat.numel())
        return dithered.roundtrip(self._clipped(flat), bucket, self.code.delta, key)

    def count(self, payload: Payload) -> None:
        header = payload.header
        if header.coordinates > header.full:
            full = padded(header.full * header.dtype.itemsize)
            self._sent += 8 * (header.length - full), header.coordinates - header.full

    def second_codec(self, bits: int) -> DitheredCodec:
        """Return a codec for averages, with the step that takes ``bits`` for Gaussian buckets. It
        needs no fit: its variance is the same for any law, and averages of more ranks approach
        Gaussian laws.
        """
        variance = gaussian_code(float(bits), None).delta ** 2 / 12
        settings, delta = Settings(**self._for_averages()), math.sqrt(12 * variance)
        return DitheredCodec(settings, None, delta, self.adaptation)

    def fitted_to(self, flat: torch.Tensor) -> DitheredCodec:
        if self.bits is None:  # the variance is the same for any law
            return self
        settings = Settings(bucket_size=self.settings.bucket_size, clip=self.settings.clip)
        copy = DitheredCodec(settings, self.bits, None, self.adaptation)
        copy.fit(flat)
        return copy

    # Fits -----------------------------------------------------------------------------------------

    def fit(self, gradients: torch.Tensor | Sequence[torch.Tensor]) -> None:
        """See ``ecdq.ECDQ.fit``."""
        usable = self._usable_in(buckets_of(gradients, self.settings))
        law, coverage = Histogram.from_counts(self._counts(usable)), Coverage.of([usable.head])
        self._fitted, self._modelled = self._code_for(law, coverage, self._control)
        self._version += 1

    def collect(self, buckets: Sequence[torch.Tensor]) -> np.ndarray:
        """Return the statistics of sampled buckets, float64: [head of ``coverage.Usable``, bits
        sent, coordinates sent, counts of abs(v_i)/(unit ρ)...].
        """
        usable = self._usable(buckets)
        return np.concatenate([usable.head, self._sent, self._counts(usable)])

    def joined(self, steps: Sequence[np.ndarray]) -> np.ndarray:
        """See ``FittedCodec``. What was sent is counted since the update."""
        total = np.sum(steps, axis=0)
        total[HEAD : HEAD + 2] = steps[-1][HEAD : HEAD + 2]
        return total

    def refit(self, collected: Sequence[np.ndarray]) -> np.ndarray:
        """Return the update that rank 0 broadcasts, computed from all ranks' statistics: float64
        [complete, fitted, share of coordinates fitted to, modelled bits, rate control's ratio,
        bits, coordinates, δ, probabilities...]. Hostile statistics keep the old code; no exception
        is raised in the middle of a step.
        """
        coverage = Coverage.of(collected)
        bits, coordinates, *counts = np.sum(collected, axis=0)[HEAD:]
        outcome = [float(coverage.complete), 0.0, 0.0]
        modelled, control, code = self._modelled, self._control, self._fitted
        if coverage.found > 0:
            try:
                law = Histogram.from_counts(counts)
                now = self._bits(self.code, law, coverage)
                control = control.updated(bits, coordinates, (now + (self._modelled or now)) / 2)
                code, modelled = self._code_for(law, coverage, control)
                self._proposed = code
                outcome[1:] = [1.0, coverage.share]
            except ValueError as error:
                logger.info("the dithered code was kept: %s", error)
        state = [modelled, control.ratio, control.bits, control.coordinates]
        own = np.empty(0) if code is None else code.numbers()
        return np.concatenate([outcome, state, own])

    def apply_update(self, update: np.ndarray, step: int, part: str = "") -> bool:
        """See ``FittedCodec``."""
        complete, fitted, self._share = bool(update[0]), bool(update[1]), float(update[2])
        if fitted:
            self._modelled, ratio, bits, coordinates = update[3:7].tolist()
            self._control = RateControl(self.bits or 0.0, ratio, bits, coordinates)
            self._fitted = self._from_numbers(update[7:])
            self._version += 1
            self._sent = np.zeros(2)
            logger.info(
                "step %d: dithered code %d%s, δ %.4g, relative variance %.3g, %.4g bits per "
                "coordinate expected; %.4g sent so far",
                step,
                self._version,
                part and f" of {part}",
                self.delta,
                self.relative_variance,
                self._modelled * ratio,
                self._control.average,
            )
        return complete

    def _from_numbers(self, numbers: np.ndarray) -> DitheredCode:
        """Return the code of ``numbers``; the rank that has fitted it has its books already."""
        proposed, self._proposed = self._proposed, None
        if proposed is not None and np.array_equal(proposed.numbers(), numbers):
            return proposed
        return DitheredCode.from_numbers(numbers)

    def _inside(self, coverage: Coverage) -> float:
        """Return the share of the coordinates that bodies hold."""
        return coverage.share_of_finite if self.leaves_zeros_out else 1.0

    def _bits(self, code: DitheredCode, law: Histogram, coverage: Coverage) -> float:
        """Return the bits that ``code`` should take, per coordinate of the gradient."""
        inside = self._inside(coverage)
        return inside * (code.bits(law, self._unit) + self._side) + coverage.places

    def _code_for(
        self, law: Histogram, coverage: Coverage, control: RateControl
    ) -> tuple[DitheredCode, float]:
        """Return a code for a law of the coordinates in bodies, and its ``_bits``."""
        if self._delta is not None:
            code = DitheredCode.of_law(law, self._unit, self._delta)
        else:
            aim = (control.aim - coverage.places) / self._inside(coverage) - self._side
            if aim < LEAST_CODED_BITS / 2:
                logger.warning(
                    "bits=%g cannot be met: %.3g per coordinate were sent so far; headers and "
                    "steps of small groups, or places of scattered zeros (keep_zeros), take more",
                    self.bits,
                    control.average,
                )
            code = DitheredCode.of_rate(law, self._unit, max(aim, LEAST_CODED_BITS / 2))
        return code, self._bits(code, law, coverage)

    def _counts(self, usable: Usable) -> np.ndarray:
        """Return weighted counts of abs(v_i)/(unit ρ), float64 (BINS + 2,); ρ is a bucket's RMS."""
        total, pairs = np.zeros(BINS + 2), zip(usable.buckets, usable.norms, strict=True)
        scales = [norm / math.sqrt(bucket.numel()) * self._unit for bucket, norm in pairs]
        of_buckets = histograms(usable.buckets, scales)
        for weight, counts in zip(usable.weights, of_buckets, strict=True):
            total += weight * counts
        return total

    # State ----------------------------------------------------------------------------------------

    def load_tables_from(self, old: DitheredCodec, keep: bool) -> None:
        super().load_tables_from(old, keep)
        self._version, self._sent, self._share = old._version, old._sent, old._share
        self._fitted, self._modelled, self._control = old._fitted, old._modelled, old._control
        if (old.bits, old._delta) != (self.bits, self._delta):
            # The budget has changed: earlier bits do not count.
            self._fitted, self._modelled, self._sent = None, 0.0, np.zeros(2)
            self._control = RateControl(self.bits or 0.0, old._control.ratio)

    def tables_state(self) -> dict[str, Any]:
        code = np.empty(0) if self._fitted is None else self._fitted.numbers()
        control = self._control
        rate = [self._modelled, control.ratio, control.bits, control.coordinates]
        return super().tables_state() | {
            "code": torch.from_numpy(code),
            "version": self._version,
            "rate": torch.tensor(rate, dtype=torch.float64, device="cpu"),
            "sent": torch.from_numpy(self._sent.copy()),
            "share": self._share,
        }

    def tables_in(self, state: Mapping[str, Any]) -> dict[str, Any]:
        of_code, code = states.numbers(state, "code"), None
        if of_code.size:
            try:
                code = DitheredCode.from_numbers(of_code)
            except ValueError as error:
                raise ValueError(f"state: code: {error}") from None
            if self._delta is not None and code.delta != self._delta:
                raise ValueError(
                    f"state: δ={code.delta} does not fit relative_variance={self._delta**2 / 12}"
                )
        version = states.whole(state, "version", 0, states.MOST_VERSION)
        rate, sent = _counts_of(state, "rate", 4), _counts_of(state, "sent", 2)
        if not rate[1]:
            raise ValueError(f"state: the second number of rate must be above 0, not {rate}")
        modelled, *of_control = rate
        return super().tables_in(state) | {
            "_fitted": code,
            "_version": version,
            "_share": share_in(state),
            "_modelled": modelled,
            "_control": RateControl(self.bits or 0.0, *of_control),
            "_sent": np.array(sent),
        }


def _counts_of(state: Mapping[str, Any], entry: str, count: int) -> list[float]:
    numbers = states.numbers(state, entry).tolist()
    if len(numbers) != count or not all(0 <= number < math.inf for number in numbers):
        raise ValueError(
            f"state: {entry} must be {count} finite numbers, none below 0, not {numbers}"
        )
    return numbers
