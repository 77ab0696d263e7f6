"""Define the lossless coders, by their names in ``coding=`` (see coder.py)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvd_adaptive import kernels
from hvd_adaptive.coding.coder import Coder
from hvd_adaptive.coding.prefix_code import PrefixCode
from hvd_adaptive.kernels.omega import code_length, zero_code
from hvd_adaptive.kernels.packing import Packing
from hvd_adaptive.kernels.prefix_tables import is_used_up


class HuffmanCoder(Coder):
    """Coder of blocks of codes by a book that all ranks share (coding/prefix_code.py)."""

    name = "huffman"
    fitted = True

    def __init__(self, packing: Packing, bucket_size: int, book: PrefixCode) -> None:
        super().__init__(packing, bucket_size)
        self.book = book

    @classmethod
    def make(
        cls, packing: Packing, bucket_size: int, probabilities: np.ndarray | None
    ) -> HuffmanCoder | None:
        if probabilities is None:
            return None
        return cls(packing, bucket_size, PrefixCode.build(probabilities))

    @property
    def fingerprint(self) -> int:
        return self.book.fingerprint

    def most_bytes(self, count: int) -> int:
        return kernels.on_host("huffman").most_bytes(count)

    def least_bytes(self, count: int) -> int:
        return -(-count * int(self.book.lengths.min()) // (8 * self.book.longest_block))

    def encode_segment(self, codes: np.ndarray, out: np.ndarray) -> int:
        out[0] = 0
        return -(-kernels.on_host("huffman").encode(codes, self.book, out) // 8)

    def decode_segment(self, data: np.ndarray, codes: np.ndarray) -> bool:
        return is_used_up(data, kernels.on_host("huffman").decode(data, 0, self.book, codes))

    def encode_segments(self, codes: np.ndarray, outs: np.ndarray) -> list[int]:
        if len(codes) != 2:
            return super().encode_segments(codes, outs)
        ends = kernels.on_host("huffman").encode_two(codes, self.book, outs)
        return [-(-end // 8) for end in ends]

    def decode_segments(self, data: Sequence[np.ndarray], codes: np.ndarray) -> list[bool]:
        if len(codes) != 2:
            return super().decode_segments(data, codes)
        first, second = data
        ends = kernels.on_host("huffman").decode_two(first, second, self.book, codes)
        return [is_used_up(*pair) for pair in zip(data, ends, strict=True)]


class EliasCoder(Coder):
    """QSGD's Code_s (section 3.1) and NUQSGD's ENCODE (section 3.2), for tables with a zero.

    Of every nonzero coordinate the distance from the previous one, the sign and the number of the
    level are coded (docs/wire_format.md). If the last coordinate is zero, the distance to the
    position after it ends the segment; the papers do not state how a decoder detects that no
    nonzero coordinate follows.

    In the papers a sequence covers one bucket and follows its norm. Here all norms come first, and
    a sequence covers all buckets of a segment. Compared to one sequence for everything, a segment
    costs its 32-bit offset, its end and the new start (ω(a) + ω(b) instead of ω(a + b)), and the
    fill bits: at most 32 + 29 + 7 bits, about 0.001 per coordinate.

    Nothing is fitted. Tables without zero are rejected: the papers have no code for them, and if
    every coordinate is nonzero, a fixed-width code is shorter than ω with a sign.
    """

    name = "elias"

    def __init__(self, packing: Packing, bucket_size: int) -> None:
        if packing.alphabet % 2 == 0:
            raise ValueError(
                "coding='elias': needs a level table with a zero (symmetric=False): it codes the "
                "distances between nonzero coordinates"
            )
        super().__init__(packing, bucket_size)
        # Bits of a distance of 1, a sign and the last level. No coordinate can take more, and
        # neither a longer distance nor the end takes more for each coordinate that it spans.
        self._most_bits = 2 + code_length(zero_code(packing.alphabet))

    def most_bytes(self, count: int) -> int:
        return -(-count * self._most_bits // 8) + kernels.on_host("elias").SLACK

    def least_bytes(self, count: int) -> int:
        # Either all codes are zeros, or all but the last one: the length is not concave, so either
        # can be the shorter.
        return -(-min(code_length(count + 1), code_length(count) + 2) // 8)

    def encode_segment(self, codes: np.ndarray, out: np.ndarray) -> int:
        return kernels.on_host("elias").encode(codes, self.packing.alphabet, out)

    def decode_segment(self, data: np.ndarray, codes: np.ndarray) -> bool:
        return kernels.on_host("elias").decode(data, self.packing.alphabet, codes)


CODERS: dict[str, type[Coder]] = {coder.name: coder for coder in (HuffmanCoder, EliasCoder)}
