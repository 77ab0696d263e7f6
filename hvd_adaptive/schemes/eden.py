"""Implement EDEN and DRIVE: rotated buckets, rounded to levels of N(0, 1) (Vargaftik et al.)."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from typing_extensions import Unpack

from hvd_adaptive import kernels
from hvd_adaptive.base.checks import is_real, is_whole
from hvd_adaptive.codec.codec import Codec
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.kernels.eden import STEP, Buckets, Levels
from hvd_adaptive.kernels.packing import packing_of
from hvd_adaptive.kernels.random import MASK64, Inside, Use, signed, stream_key
from hvd_adaptive.levels.lloyd_max import distortion, normal_levels
from hvd_adaptive.settings import Settings, Shared

LEAST_BITS, MOST_BITS = 1, 8
FRACTIONS = (0.5, 0.25, 0.125)
LEAST_BUCKET, MOST_BUCKET, DEFAULT_BUCKET = 64, 1 << 16, 4096
KEY_BYTES = 8  # of the shared rotation's stream, with which a body begins


class EDEN(GradientCompressor):
    """Efficient DNN Distributed Mean Estimation (EDEN; Vargaftik et al., ICML 2022).

    A bucket x of n coordinates is rotated: y = R x. Coordinates of y are nearly normal for every x.
    Each is rounded to the nearest of the 2**bits Lloyd-Max levels of N(0, ‖y‖²/n), q. One number
    is sent, S = ‖y‖²/⟨y, q⟩, and the estimate is S Rᵀ q. Its projection on x is x itself. Its
    squared error is ‖x‖² (‖y‖²‖q‖²/⟨y, q⟩² - 1), which for normal coordinates is D/(1 - D) ‖x‖². D
    is the levels' distortion: 0.571 for one bit, 0.133 for two, 0.0358 for three.

    R is H D_own H D_shared: Hadamard matrices and random signs, with one more factor H D, shared,
    from five bits on. The bias is of the order ‖x‖/n. All ranks have the same D_shared, so that
    payloads are added before H D_shared is inverted, once. D_own differs between ranks and steps,
    so that errors of equal gradients average out. docs/theory.md derives all of this.

    With less than one bit the first n · ``bits`` coordinates of y have one bit each. S then is
    ‖y‖²/⟨y, q⟩ over these, and the error about (1/(1 - D)/``bits`` - 1) ‖x‖². A partial bucket is
    filled up to a multiple of 64 coordinates, which takes no bits. If they are no power of two, a
    rotation has four smaller Hadamard matrices; error and bias are those of whole buckets.

    A zero bucket, and one whose S is below 2**-126, decodes to zeros. A bucket with NaN or Inf
    decodes to NaN. The second stage of ``exchange="scatter_reduce"`` is an EDEN with more bits.

    Args:
        bits: Bits per coordinate: 1 to 8, or 0.5, 0.25 or 0.125.
        **shared: See ``hvd_adaptive.settings.Settings``. ``bucket_size`` must be a power of two
            from 64 to 65,536; 4096 if not given. With ``bits`` below 1, bits · bucket_size must be
            at least 64.

    Examples:
        >>> from hvd_adaptive import EDEN
        >>> compressor = EDEN(bits=2)
        >>> gradient = torch.randn(65_536)
        >>> payload = compressor.encode(gradient)
        >>> round(gradient.nbytes / payload.nbytes, 1)
        15.8
        >>> difference = compressor.decode(payload) - gradient
        >>> bool(difference.norm() < 0.4 * gradient.norm())
        True
    """

    def __init__(self, *, bits: float = 2, **shared: Unpack[Shared]) -> None:
        self._build(EDEN, bits, shared)

    def _build(self, kind: type, bits: float, shared: Mapping[str, Any]) -> None:
        is_integer = is_whole(bits) and LEAST_BITS <= bits <= MOST_BITS
        if not (is_integer or (is_real(bits) and bits in FRACTIONS)):
            raise ValueError(
                f"bits={bits!r}: must be an integer from {LEAST_BITS} to {MOST_BITS}, or one of "
                f"{', '.join(map(str, FRACTIONS))}"
            )
        bits = int(bits) if is_integer else float(bits)
        settings = Settings.from_keywords(kind, {"bucket_size": DEFAULT_BUCKET, **shared})
        size = settings.bucket_size
        if not LEAST_BUCKET <= size <= MOST_BUCKET or size & (size - 1):
            raise ValueError(
                f"bucket_size={size!r}: must be a power of two from {LEAST_BUCKET} to {MOST_BUCKET}"
            )
        if bits * size < STEP:
            raise ValueError(
                f"bucket_size={size!r}: must be at least {int(STEP / bits)} with bits={bits!r}"
            )
        super().__init__(EDENCodec(settings, bits))


class DRIVE(EDEN):
    """One-bit EDEN, which was published first (DRIVE; Vargaftik et al., NeurIPS 2021).

    Signs of rotated coordinates and one scale for each bucket are sent. The payloads are those of
    ``EDEN(bits=1)``.

    Args:
        **shared: See ``EDEN``.

    Examples:
        >>> from hvd_adaptive import DRIVE
        >>> gradient = torch.randn(65_536)
        >>> round(gradient.nbytes / DRIVE().encode(gradient).nbytes)
        31
    """

    def __init__(self, **shared: Unpack[Shared]) -> None:
        self._build(DRIVE, 1, shared)


class EDENCodec(Codec):
    """Codec of EDEN; ``bits`` is 1 to 8, or one of ``FRACTIONS``."""

    name = "eden"
    alphabet = 0  # until the constructor has set it

    def __init__(self, settings: Settings, bits: float) -> None:
        super().__init__(settings)
        self.bits = bits
        width = max(LEAST_BITS, int(bits))
        self._levels = Levels.of(normal_levels(width), min(bits, 1.0))  # as kernels read them
        self.alphabet = 1 << width
        self._packing = packing_of(self.alphabet)
        # Levels are computed, so that processors might differ in a last digit.
        self._fingerprint = zlib.crc32(self._levels.values.astype("<f4").tobytes())
        self._shared = stream_key(settings.seed, 0, 0, Use.ROTATION)

    @property
    def table_fingerprint(self) -> int:
        return self._fingerprint

    @property
    def levels(self) -> np.ndarray:
        """Return the levels of N(0, 1) that codes are decoded to, ascending: float32."""
        return self._levels.values

    @property
    def expected_error(self) -> float:
        """Return the relative squared error of normal coordinates: D/(1 - D) of whole bits."""
        lost = distortion(normal_levels(self._levels.bits))
        return 1 / (1 - lost) / self._levels.share - 1

    def codec_settings(self) -> dict[str, Any]:
        return {"bits": self.bits}

    def second_codec(self, bits: int) -> Codec:
        return EDENCodec(Settings(**self._for_averages()), bits)

    def body_bytes(self, coordinates: int) -> int:
        buckets = Buckets(coordinates, self.settings.bucket_size)
        codes = self._levels.codes(buckets.codes, buckets.size)
        return KEY_BYTES + 4 * (buckets.count + self._packing.words(codes))

    def encode_body(self, flat: torch.Tensor, body: torch.Tensor, key: int) -> None:
        body[:KEY_BYTES].view(torch.int64).fill_(signed(self._shared))
        flat = self._clipped(flat)
        scales, words = self._split(body, flat.numel())
        encode = kernels.for_device(flat.device, "eden").encode
        size, own = self.settings.bucket_size, stream_key(key, Inside.ROTATION)
        encode(flat, scales, words, size, self._levels, self._shared, own)

    def add_bodies(
        self, bodies: Sequence[torch.Tensor], keys: Sequence[int], factor: float, out: torch.Tensor
    ) -> None:
        own = torch.stack([body[:KEY_BYTES].view(torch.int64)[0] for body in bodies]).tolist()
        triples = zip(own, bodies, keys, strict=True)
        for shared, neighbours in groupby(triples, key=lambda triple: triple[0]):
            self._add([(body, key) for _, body, key in neighbours], shared & MASK64, out)
        if factor != 1.0:
            out *= factor

    def decode_own_bodies(
        self,
        bodies: Sequence[torch.Tensor],
        keys: Sequence[int],
        factor: float,
        out: torch.Tensor,
        add: bool = True,
    ) -> None:
        """See ``Quantizer.decode_own_bodies``; the rotation is this codec's."""
        if not add:
            out.zero_()
        self._add(list(zip(bodies, keys, strict=True)), self._shared, out)
        if factor != 1.0:
            out *= factor

    def _add(
        self, pairs: Sequence[tuple[torch.Tensor, int]], shared: int, out: torch.Tensor
    ) -> None:
        """Add the values of bodies that share a rotation, given with their keys."""
        payloads = [self._split(body, out.numel()) for body, _ in pairs]
        streams = [stream_key(key, Inside.ROTATION) for _, key in pairs]
        decode = kernels.for_device(out.device, "eden").decode_add
        decode(payloads, self.settings.bucket_size, self._levels, shared, streams, out)

    def _split(self, body: torch.Tensor, coordinates: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scales and words of a body."""
        at = KEY_BYTES + 4 * self._buckets(coordinates)
        return body[KEY_BYTES:at].view(torch.float32), body[at:].view(torch.int32)
