"""Code blocks of a table's codes with a fitted prefix code (``coding="huffman"``)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvd_adaptive import kernels
from hvd_adaptive.coding.coder import Coder
from hvd_adaptive.coding.prefix_code import PrefixCode
from hvd_adaptive.kernels.packing import Packing


class HuffmanCoder(Coder):
    """Coder of blocks of codes by a book that all ranks share (coding/prefix_code.py).

    A segment holds the codes of its blocks; the last block is completed, and bits 0 fill the last
    byte.
    """

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
        return _is_used_up(data, kernels.on_host("huffman").decode(data, 0, self.book, codes))

    def encode_segments(self, codes: np.ndarray, outs: np.ndarray) -> list[int]:
        if len(codes) != 2:
            return super().encode_segments(codes, outs)
        return [
            -(-end // 8) for end in kernels.on_host("huffman").encode_two(codes, self.book, outs)
        ]

    def decode_segments(self, data: Sequence[np.ndarray], codes: np.ndarray) -> list[bool]:
        if len(codes) != 2:
            return super().decode_segments(data, codes)
        first, second = data
        ends = kernels.on_host("huffman").decode_two(first, second, self.book, codes)
        return [_is_used_up(*pair) for pair in zip(data, ends, strict=True)]


def _is_used_up(data: np.ndarray, end: int) -> bool:
    """Return whether a stream of whole bytes ends at bit ``end`` and its remaining bits are 0."""
    if end < 0 or -(-end // 8) != data.size:
        return False
    return end % 8 == 0 or int(data[-1]) >> end % 8 == 0
