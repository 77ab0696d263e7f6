"""Choose the codec of averaged gradients and its bits.

Ranks' first stages are independent, each of relative variance γ1 = E||Q(g) - g||²/||g||², so their
average a over N ranks has E||a - ḡ||² = γ1 ||g||²/N (ranks alike) and E||a||² = ||ḡ||² +
γ1 ||g||²/N. A second stage of relative variance γ2 adds γ2 E||a||². As a share of γ1 ||g||²/N this
is

    gradients aligned, ||ḡ|| = ||g||:            s = N γ2 (1 + γ1/N)/γ1
    orthogonal, as noise is, ||ḡ||² = ||g||²/N:  s = γ2 (1 + γ1)/γ1

By Pythagoras real gradients lie between these cases. The first s is larger unless γ2 depends on the
case, so both are computed, and the larger one counts.

The default weighs the error of averages against bytes. A rank sends one bit more of each coordinate
either for the first stage or for averages. A bit more halves the steps of a table and divides its
variance by about 4. In the first stage it therefore lowers the total error by ``WORTH``, 3/4 of
γ1 ||g||²/N. Averages have the fewest bits b from which one more would lower the error by less:
s(b) - s(b+1) <= 3/4. Then s(b), about 4 s(b+1), is at most about 1: the second stage adds no more
than the first one. More bits for averages would have less error than these, but the same bytes in
the first stage have less still (benchmarks/second_stage.py).

γ1 and γ2 depend on the gradients. They are those of two references, normal and Laplacian
coordinates, to which tables are fitted first: exact if a formula gives the codec's error, else
measured. The larger share counts. (An adaptive first stage is better on heavy tails, and its second
stage must be, too.) Gradients with heavier tails may have a larger one. The variance of a biased
first stage is its squared error. If the first stage is lossless (γ1 = 0: every coordinate is its
own bucket, or all are sent), averages are sent in full precision.

Behind a fine first stage even 8 bits may add more than the first one has. What they add is then
mostly negligible by itself. An average's second moment grows by the factor 1 + γ2. To reach the
same bound, R G/√T for the second moment G² (ALQ Theorem 4, corrected; theory.nonsmooth_convex), T
must grow by the same factor. ``NEGLIGIBLE``, γ2 = 0.01, is thus one step in a hundred. Beyond it a
warning names what adds no error.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from hvd_adaptive.codec.payloads import Payloads
from hvd_adaptive.coding.payload import SIZE
from hvd_adaptive.kernels.random import Use, stream_key

if TYPE_CHECKING:
    from hvd_adaptive.codec.quantizer import Quantizer

logger = logging.getLogger("hvd_adaptive")

LEAST_BITS, MOST_BITS, FULL_PRECISION = 2, 8, 32
WORTH = 0.75  # of the first stage's variance: what one bit more saves there
SHARE, NEGLIGIBLE = 0.25, 0.01
# Relative variance of a float32 vector whose coordinates are rounded: at most 2**-48.
ROUNDING = 2.0**-44
# Most ranks whose average is measured; γ2 of more ranks is assumed equal. Draws of an error that no
# formula gives.
MOST_RANKS, DRAWS = 8, 4
# Shift between ranks that simulates independent gradients.
APART = 1237
LEAST_COORDINATES, MOST_COORDINATES = 1 << 14, 1 << 16

# By name and settings of the first stage, and ranks.
_chosen: dict[tuple[str, str, int], int] = {}
_looked_at: set[tuple[str, str, int]] = set()


@dataclass(frozen=True)
class SecondStage:
    """How averages of ``ranks`` ranks are sent: by ``codec``, or unquantised if ``bits`` is 32."""

    ranks: int
    bits: int
    codec: Quantizer

    def quantized(self, coordinates: int) -> int:
        """Return how many of ``coordinates`` quantised coordinates are quantised again."""
        return 0 if self.bits == FULL_PRECISION else coordinates

    @functools.cached_property
    def payloads(self) -> Payloads:
        """Return what encodes and decodes averages."""
        return Payloads(self.codec)

    def length(self, quantized: int, full: int, dtype: torch.dtype) -> int:
        """Return ``Payloads.length`` of an average."""
        again = self.quantized(quantized)
        return self.payloads.length(again, full + quantized - again, dtype)

    def most_length(self, quantized: int, full: int, dtype: torch.dtype) -> int:
        """Return ``Payloads.most_length`` of an average."""
        again = self.quantized(quantized)
        return self.payloads.most_length(again, full + quantized - again, dtype)


def make_second_stage(codec: Quantizer, ranks: int, bits: int) -> SecondStage:
    """Return the second stage of ``codec`` with ``bits`` bits."""
    full = bits == FULL_PRECISION
    return SecondStage(ranks, bits, codec if full else codec.second_codec(bits))


def default_bits(codec: Quantizer, ranks: int) -> int:
    """Return the fewest bits from which one more is worth less than one in the first stage: at most
    8, or 32 if the first stage is lossless; the same on every rank.
    """
    known = codec.name, codec.described, ranks
    if known not in _chosen:
        _chosen[known] = _choose(codec, ranks)
    return _chosen[known]


def _choose(codec: Quantizer, ranks: int) -> int:
    laws = _laws(codec, ranks)
    if all(law.is_lossless for law in laws):
        return FULL_PRECISION
    bits = max(law.least_bits for law in laws)
    share = max(law.added(bits)[0] for law in laws)
    while bits < MOST_BITS:
        further = max(law.added(bits + 1)[0] for law in laws)
        if share - further <= WORTH:
            break
        bits, share = bits + 1, further
    logger.debug("second stage of %r over %d ranks: %d bits", codec, ranks, bits)
    return bits


def warn_of_averages(codec: Quantizer, ranks: int, nodes: bool = False) -> None:
    """Warn once, on one rank, if the default bits add a notable error to averages."""
    known = codec.name, codec.described, ranks
    if codec.settings.second_stage_bits is not None or known in _looked_at:
        return
    _looked_at.add(known)
    if default_bits(codec, ranks) != MOST_BITS:
        return
    added = [law.added(MOST_BITS) for law in _laws(codec, ranks)]
    share, error = (max(values) for values in zip(*added, strict=True))
    if share > SHARE and error > NEGLIGIBLE:
        logger.warning(
            "averages over %d %s: %d bits add a relative error of up to %.2g for normal or "
            "Laplacian coordinates, %.2g times the first stage's; %s",
            ranks,
            "nodes" if nodes else "ranks",
            MOST_BITS,
            error,
            share,
            _remedy(codec, ranks, nodes),
        )


def _remedy(codec: Quantizer, ranks: int, nodes: bool) -> str:
    """Return which setting adds no error for the fewest bytes that a rank sends."""
    v = references(codec.settings.bucket_size)[0]
    first = codec.fitted_to(v)
    second = first.trained_second(MOST_BITS, ranks, v)
    own, again = _sent_bits(first, v), _sent_bits(second, v)
    kind = "Hierarchical" if nodes else "ScatterReduce"
    full = f"exchange={kind}(second_stage_bits=32)"
    found = {full: (own + FULL_PRECISION) * (ranks - 1) / ranks}
    if not nodes:
        found["exchange='allgather'"] = own * (ranks - 1)
    best, now = min(found, key=lambda name: found[name]), (own + again) * (ranks - 1) / ranks
    return f"{best} adds none, and sends {found[best]:.3g} bits a coordinate, not {now:.3g}"


def _sent_bits(codec: Quantizer, v: torch.Tensor) -> float:
    """Return the bits of a coordinate, without the header, of which large groups have little."""
    return 8 * (Payloads(codec).encode(v, v.numel(), _key(0)).header.length - SIZE) / v.numel()


def _laws(codec: Quantizer, ranks: int) -> list[_Averages]:
    return [_Averages(codec, v, ranks) for v in references(codec.settings.bucket_size)]


class _Averages:
    """Averages of a reference over ``ranks`` ranks, decoded."""

    def __init__(self, codec: Quantizer, v: torch.Tensor, ranks: int) -> None:
        measured = min(ranks, MOST_RANKS)
        self._v, self._ranks, self._first = v, ranks, codec.fitted_to(v)
        decoded = [Payloads(self._first).roundtrip(v, _key(draw)) for draw in range(measured)]
        gamma1 = _gamma(self._first, v, 0)
        aligned = torch.stack(decoded).mean(dim=0)
        apart = [d.roll(rank * APART) for rank, d in enumerate(decoded)]
        orthogonal = torch.stack(apart).mean(dim=0)
        # Each with E||average||**2 / ||g||**2.
        self._cases = [(aligned, 1 + gamma1 / ranks), (orthogonal, (1 + gamma1) / ranks)]
        self._variance = gamma1 / ranks
        # Fewer bits than a fitted first stage's own are never enough.
        fitted = self._first is not codec
        self.least_bits = (self._first.alphabet - 1).bit_length() if fitted else LEAST_BITS
        self.least_bits = min(max(self.least_bits, LEAST_BITS), MOST_BITS)

    @property
    def is_lossless(self) -> bool:
        """Return whether the first stage is exact up to float32's rounding."""
        return self._variance <= ROUNDING

    def added(self, bits: int) -> tuple[float, float]:
        """Return the variance that a second stage, fitted as in training, adds, as a share of the
        first stage's, and γ2.
        """
        second = self._first.trained_second(bits, self._ranks, self._v)
        gammas = [_gamma(second, average, -DRAWS) for average, _ in self._cases]
        squares = [square for _, square in self._cases]
        most = max(gamma * square for gamma, square in zip(gammas, squares, strict=True))
        return most / max(self._variance, ROUNDING), max(gammas)


def _gamma(codec: Quantizer, v: torch.Tensor, first: int) -> float:
    """Return the relative variance: exact, or measured in the draws from ``first`` on."""
    if codec.expected_error is not None and codec.settings.clip is None:
        return codec.expected_error  # no kernels of other bits are compiled
    draws = 1 if codec.knows_errors else DRAWS
    found = [Payloads(codec).squared_errors(v, _key(first + draw)) for draw in range(draws)]
    error, square = torch.stack(found).sum(dim=(0, 1)).tolist()
    return error / square


@functools.lru_cache(maxsize=4)
def references(bucket_size: int) -> list[torch.Tensor]:
    """Return normal and Laplacian coordinates (float32, variance 1): shuffled quantiles at equal
    steps, of whole small buckets or one large bucket, cut to 65,536 coordinates.
    """
    size = 1 << (max(1, bucket_size) - 1).bit_length()
    size = min(max(size, LEAST_COORDINATES), MOST_COORDINATES)
    order = np.random.Generator(np.random.Philox(key=size)).permutation(size)
    y = (torch.from_numpy(order).to(torch.float32) + 0.5) / size
    laplacian = -torch.sign(y - 0.5) * torch.log1p(-2 * (y - 0.5).abs()) / 2**0.5
    return [torch.special.ndtri(y).to(torch.float32), laplacian.to(torch.float32)]


def _key(draw: int) -> int:
    return stream_key(0, 0, draw, Use.MEASURE)
