"""``coding="elias"``: the distances between nonzero coordinates, and what these are."""

from __future__ import annotations

import numpy as np

from hvd_adaptive import kernels
from hvd_adaptive.coding.coder import Coder
from hvd_adaptive.kernels.omega import code_length, zero_code
from hvd_adaptive.kernels.packing import Packing


class EliasCoder(Coder):
    """QSGD's Code_s (section 3.1) and NUQSGD's ENCODE (section 3.2), for tables with a zero.

    A segment, each byte from its highest bit on, with ω the code of omega.py: for every nonzero
    coordinate ω(its distance from the nonzero one before it; of the first, its place, from 1), a
    bit 0 where it is positive or 1 where it is negative, ω(number of its level, from 1). Where the
    last coordinate is zero, the distance to the place behind it ends the segment (the papers leave
    open how a decoder knows that no nonzero coordinate follows). Then bits 0 up to the next byte.

    The papers' sequence belongs to one bucket, after its norm. Here the norms stay together in
    front, and a sequence runs through all buckets of a segment. Against one sequence for everything
    a segment costs its 32-bit offset, the end and the new start, ω(a) + ω(b) in place of ω(a + b),
    and the filling: 32 + 29 + 7 bits at most, about 0.001 a coordinate.

    Nothing is fitted. Tables without zero are refused: the papers have no code for them, and where
    every coordinate is nonzero one of fixed width is shorter than ω with a sign.
    """

    name = "elias"

    def __init__(self, packing: Packing, bucket_size: int) -> None:
        super().__init__(packing, bucket_size)
        # A distance of 1, a sign, the last level: no coordinate can take more, nor can a longer
        # distance or the end take more than so much for each coordinate that it spans.
        self._most_bits = 2 + code_length(zero_code(packing.alphabet))

    @classmethod
    def check(cls, symmetric: bool) -> None:
        if symmetric:
            raise ValueError(
                "coding='elias': needs a level table with a zero (symmetric=False): it codes the "
                "distances between nonzero coordinates"
            )

    @classmethod
    def make(
        cls, packing: Packing, bucket_size: int, probabilities: np.ndarray | None
    ) -> EliasCoder:
        return cls(packing, bucket_size)

    def most_bytes(self, count: int) -> int:
        return -(-count * self._most_bits // 8) + kernels.on_host("elias").SLACK

    def least_bytes(self, count: int) -> int:
        # All zeros, or but the last one: the length is not concave, so either can be the shorter.
        return -(-min(code_length(count + 1), code_length(count) + 2) // 8)

    def encode_segment(self, codes: np.ndarray, out: np.ndarray) -> int:
        return kernels.on_host("elias").encode(codes, self.packing.alphabet, out)

    def decode_segment(self, data: np.ndarray, codes: np.ndarray) -> bool:
        return kernels.on_host("elias").decode(data, self.packing.alphabet, codes)
