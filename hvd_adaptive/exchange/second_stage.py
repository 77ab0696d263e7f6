"""The codec of averaged gradients: which one, and with how many bits.

Ranks' first stages are independent, each of relative variance γ1 = E||Q(g) - g||²/||g||², so their
average a over N ranks has E||a - ḡ||² = γ1 ||g||²/N (ranks alike) and E||a||² = ||ḡ||² +
γ1 ||g||²/N. A second stage of relative variance γ2 adds γ2 E||a||², which is to be at most a
quarter of the former:

    gradients aligned, ||ḡ|| = ||g||:         γ2 (1 + γ1/N) <= γ1/4N
    orthogonal, as noise is, ||ḡ||² = ||g||²/N:  γ2 (1 + γ1)/N <= γ1/4N

By Pythagoras real gradients lie between, and the first asks for most unless γ2 depends on the
case; both are kept. A bit more divides γ2 by about 4 (steps are halved), so that about
1 + log4(N + γ1) bits are added: two at 4 ranks and small γ1, three up to 16.

γ1 and γ2 depend on the gradients. They are measured, with the codecs themselves, on two references,
normal and Laplacian coordinates, to which tables are fitted first; it must hold on both. (A first
stage that adapts is better on heavy tails, and its second stage must be, too.) So the quarter is
kept on these laws, and is what to expect elsewhere, not a bound: gradients with tails heavier still
may get more. A biased first stage counts with its squared error. A first stage that loses nothing
(γ1 = 0: every coordinate is its own bucket, or all are sent) leaves no room for a second one that
does: averages then travel in full precision.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from hvd_adaptive.kernels.random import stream_key
from hvd_adaptive.streams import Use

if TYPE_CHECKING:
    from hvd_adaptive.codec import Codec

logger = logging.getLogger("hvd_adaptive")

LEAST_BITS, MOST_BITS, FULL_PRECISION = 2, 8, 32
SHARE = 0.25
# Relative variance of a float32 vector whose coordinates are rounded: at most 2**-48.
ROUNDING = 2.0**-44
# Ranks whose average is measured, at most: γ2 of more is taken to be the same. Draws of each error.
MOST_RANKS, DRAWS = 8, 4
# Places between the coordinates that ranks with independent gradients average.
APART = 1237
LEAST_COORDINATES, MOST_COORDINATES = 1 << 14, 1 << 16

_chosen: dict[tuple[str, int], int] = {}


@dataclass(frozen=True)
class SecondStage:
    """How averages of ``ranks`` ranks travel: by ``codec``, or in full precision where bits is
    32."""

    ranks: int
    bits: int
    codec: Codec

    def quantized(self, coordinates: int) -> int:
        """How many of so many quantised coordinates are quantised again."""
        return 0 if self.bits == FULL_PRECISION else coordinates

    def payload_bytes(self, quantized: int, full: int, dtype: torch.dtype) -> int:
        """Length of an average's payload, at most."""
        again = self.quantized(quantized)
        return self.codec.payload_bytes(again, full + quantized - again, dtype)


def make_second_stage(codec: Codec, ranks: int, bits: int) -> SecondStage:
    """The second stage of ``codec`` with so many bits."""
    full = bits == FULL_PRECISION
    return SecondStage(ranks, bits, codec if full else codec.second_codec(bits))


def default_bits(codec: Codec, ranks: int) -> int:
    """The fewest bits that add at most a quarter of the first stage's variance on the references; 8
    where not even these do, 32 if the first stage loses nothing. The same on every rank."""
    known = repr(codec), ranks
    if known not in _chosen:
        _chosen[known] = _choose(codec, ranks)
    return _chosen[known]


def _choose(codec: Codec, ranks: int) -> int:
    laws = [_Averages(codec, v, ranks) for v in references(codec.settings.bucket_size)]
    if all(law.is_lossless for law in laws):
        return FULL_PRECISION
    for bits in range(max(law.least_bits for law in laws), MOST_BITS + 1):
        share = max(law.share(bits) for law in laws)
        if share <= SHARE:
            break
    else:
        logger.warning(
            "the second stage of exchange=%r over %d ranks adds %.2g times the first one's "
            "variance at 8 bits, and should add %.2g at most: second_stage_bits=32 adds none",
            codec.settings.exchange,
            ranks,
            share,
            SHARE,
        )
    logger.debug("second stage of %r over %d ranks: %d bits", codec, ranks, bits)
    return bits


class _Averages:
    """Averages of a reference over ``ranks`` ranks, decoded."""

    def __init__(self, codec: Codec, v: torch.Tensor, ranks: int) -> None:
        measured = min(ranks, MOST_RANKS)
        self._first = codec.fitted_to(v)
        decoded = [self._first.roundtrip(v, _key(draw)) for draw in range(max(measured, DRAWS))]
        gamma1 = sum(_square(d - v) for d in decoded) / len(decoded) / _square(v)
        aligned = torch.stack(decoded[:measured]).mean(dim=0)
        apart = [d.roll(rank * APART) for rank, d in enumerate(decoded[:measured])]
        orthogonal = torch.stack(apart).mean(dim=0)
        # With E||average||**2 / ||g||**2 of so many ranks.
        self._cases = [(aligned, 1 + gamma1 / ranks), (orthogonal, (1 + gamma1) / ranks)]
        self._variance = gamma1 / ranks
        # Fewer bits than a fitted first stage's own are never enough.
        fitted = self._first is not codec
        self.least_bits = (self._first.alphabet - 1).bit_length() if fitted else LEAST_BITS
        self.least_bits = min(max(self.least_bits, LEAST_BITS), MOST_BITS)

    @property
    def is_lossless(self) -> bool:
        """Whether the first stage loses nothing but float32's rounding."""
        return self._variance <= ROUNDING

    def share(self, bits: int) -> float:
        """What a second stage of so many bits adds, of the first one's variance."""
        both = torch.cat([average for average, _ in self._cases])
        second = self._first.second_codec(bits).fitted_to(both)
        added = max(_gamma(second, average) * square for average, square in self._cases)
        return added / max(self._variance, ROUNDING)


def _gamma(codec: Codec, v: torch.Tensor) -> float:
    """Relative variance, measured."""
    errors = [_square(codec.roundtrip(v, _key(-draw)) - v) for draw in range(1, 1 + DRAWS)]
    return sum(errors) / DRAWS / _square(v)


@functools.lru_cache(maxsize=4)
def references(bucket_size: int) -> list[torch.Tensor]:
    """Normal and Laplacian coordinates (float32, of variance 1): quantiles at equal steps,
    shuffled; whole small buckets, or one large one, cut to 65,536."""
    size = 1 << (max(1, bucket_size) - 1).bit_length()
    size = min(max(size, LEAST_COORDINATES), MOST_COORDINATES)
    place = np.random.Generator(np.random.Philox(key=size)).permutation(size)
    y = (torch.from_numpy(place).to(torch.float32) + 0.5) / size
    laplacian = -torch.sign(y - 0.5) * torch.log1p(-2 * (y - 0.5).abs()) / 2**0.5
    return [torch.special.ndtri(y).to(torch.float32), laplacian.to(torch.float32)]


def _square(v: torch.Tensor) -> float:
    return float(v.double().square().sum())


def _key(draw: int) -> int:
    return stream_key(0, 0, draw, Use.MEASURE)
