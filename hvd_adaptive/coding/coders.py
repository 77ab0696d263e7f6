"""Define the lossless coders: words of a table scheme's codes become a shorter stream, and back.

A scheme's kernels always write fixed-width or radix words. If ``coding=`` names a coder, these
words are unpacked, coded and discarded, segment by segment. A receiver restores the same words
before it decodes them.

docs/wire_format.md describes the stream. Every segment is a stream of its own and begins at a byte,
so segments can be coded in parallel, and any range of coordinates can be decoded alone. All
segments except the last have ``segment`` coordinates.

To add a coder, write a subclass with ``encode_segment``, ``decode_segment`` and the two bounds, an
entry in CODERS and a number in ``coding.CODINGS``.
"""

from __future__ import annotations

import functools
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from hvd_adaptive import kernels
from hvd_adaptive.base.errors import PayloadError
from hvd_adaptive.coding.prefix_code import PrefixCode
from hvd_adaptive.kernels.constants import LAST_END
from hvd_adaptive.kernels.omega import code_length, zero_code
from hvd_adaptive.kernels.packing import BLOCK, LANES, Packing
from hvd_adaptive.kernels.prefix_tables import is_used_up
from hvd_adaptive.kernels.threads import mapped

# Target number of coordinates of a segment; the actual number is at most twice this. A segment fits
# in the second-level cache, and the 32 bits of its offset are negligible.
SEGMENT = 1 << 16
PADDING = 7  # most bytes after a stream


def segment_size(packing: Packing, bucket_size: int) -> int:
    """Return the coordinates of a segment: whole words of each lane, whole buckets if possible."""
    unit = BLOCK
    if packing.digits > 1:
        unit = LANES * packing.digits * (32 // math.gcd(32, packing.width))
    both = math.lcm(unit, bucket_size)
    step = both if both <= 2 * SEGMENT else unit
    return max(1, SEGMENT // step) * step


class Coder(ABC):
    """Coder of codes (uint8, each below the alphabet) to bytes and back; it is immutable, so that
    threads share it. If it is ``fitted``, it needs the probabilities of ascending levels (float64).
    Raise ValueError if no table with this number of levels can be coded.
    """

    name: str = ""  # the value of ``coding=``
    fitted: bool = False
    fingerprint = 0  # 32 bits that differ between code books; 0 if there is only one

    def __init__(
        self, packing: Packing, bucket_size: int, probabilities: np.ndarray | None = None
    ) -> None:
        self.packing = packing
        self.segment = segment_size(packing, bucket_size)

    @abstractmethod
    def most_bytes(self, count: int) -> int:
        """Return the most bytes that ``encode_segment`` writes for ``count`` codes, with slack."""

    @abstractmethod
    def least_bytes(self, count: int) -> int:
        """Return the fewest bytes that ``count`` >= 1 codes of one segment can take."""

    @abstractmethod
    def encode_segment(self, codes: np.ndarray, out: np.ndarray) -> int:
        """Code ``codes`` (uint8) into ``out`` (uint8, ``most_bytes`` long); return its length."""

    @abstractmethod
    def decode_segment(self, data: np.ndarray, codes: np.ndarray) -> bool:
        """Decode ``data`` (uint8) into ``codes`` (uint8), and access no other memory; return False
        if ``data`` is not used up to its last byte, or if its unused bits are not 0.
        """

    def encode_segments(self, codes: np.ndarray, outs: np.ndarray) -> list[int]:
        """Call ``encode_segment`` for each row; override it if two at a time are faster."""
        return [self.encode_segment(*pair) for pair in zip(codes, outs, strict=True)]

    def decode_segments(self, data: Sequence[np.ndarray], codes: np.ndarray) -> list[bool]:
        """Call ``decode_segment`` for each row."""
        return [self.decode_segment(*pair) for pair in zip(data, codes, strict=True)]

    # The container -------------------------------------------------------------------------------

    def least_stream_bytes(self, coordinates: int) -> int:
        """Return the fewest bytes that a stream of ``coordinates`` codes can take."""
        whole, rest = divmod(coordinates, self.segment)
        least = whole * (4 + self.least_bytes(self.segment)) if whole else 0
        return least + (4 + self.least_bytes(rest) if rest else 0)

    def encode(self, words: torch.Tensor, coordinates: int, most: int) -> torch.Tensor | None:
        """Code words (int32, ``packing.words(coordinates)``), in ``torch.get_num_threads()``
        threads, into a stream (uint8), or None if it would be longer than ``most`` bytes.
        """
        head = 4 * self._segments(coordinates)
        if head > most:
            return None
        most = min(most, head + LAST_END)
        out = np.empty(most, np.uint8)
        ends, at = out[:head].view("<u4"), 0
        code = functools.partial(self._coded, words.cpu(), coordinates)
        coded: Iterator[list[np.ndarray]] = mapped(code, self._groups(coordinates))
        for index, part in enumerate(itertools.chain.from_iterable(coded)):
            if head + at + part.size > most:
                return None
            out[head + at : head + at + part.size] = part
            at += part.size
            ends[index] = at
        return torch.from_numpy(out[: head + at]).to(words.device)

    def decode(self, stream: torch.Tensor, coordinates: int) -> torch.Tensor:
        """Invert ``encode``; raise PayloadError if the stream is invalid. Up to 7 bytes of padding,
        which must be 0, may follow it.
        """
        data = stream.cpu().numpy()
        ends = self._ends(data, coordinates)
        out = torch.empty(self.packing.words(coordinates), dtype=torch.int32, device="cpu")
        pack = kernels.on_host("codes").pack

        def fill(group: range) -> None:
            rows = self._decoded(data, ends, coordinates, group)
            for index, codes in zip(group, rows, strict=True):
                own = out[self.packing.words(index * self.segment) :]
                pack(torch.from_numpy(codes), self.packing, own)

        for _ in mapped(fill, self._groups(coordinates)):
            pass
        return out.to(stream.device)

    def _segments(self, coordinates: int) -> int:
        return -(-coordinates // self.segment)

    def _count(self, coordinates: int, index: int) -> int:
        """Return the coordinates of a segment."""
        return min(self.segment, coordinates - index * self.segment)

    def _groups(self, coordinates: int) -> list[range]:
        """Return groups of one or two segments of equal size; a thread processes one group."""
        whole, count = coordinates // self.segment, self._segments(coordinates)
        groups = [range(k, min(k + 2, whole)) for k in range(0, whole, 2)]
        return groups if whole == count else [*groups, range(whole, count)]

    def _coded(self, words: torch.Tensor, coordinates: int, group: range) -> list[np.ndarray]:
        """Return the bytes of a group's segments in new buffers: others may still be in use."""
        count = self._count(coordinates, group[0])
        codes = np.empty((len(group), count), np.uint8)
        outs = np.empty((len(group), self.most_bytes(count)), np.uint8)
        unpack = kernels.on_host("codes").unpack
        for index, row in zip(group, codes, strict=True):
            own = words[self.packing.words(index * self.segment) :]
            unpack(own, self.packing, torch.from_numpy(row))
        sizes = self.encode_segments(codes, outs)
        return [out[:size] for out, size in zip(outs, sizes, strict=True)]

    def _decoded(
        self, data: np.ndarray, ends: np.ndarray, coordinates: int, group: range
    ) -> np.ndarray:
        """Return the codes of a group's segments, one row each."""
        head = 4 * len(ends)
        begins = [head + (int(ends[index - 1]) if index else 0) for index in group]
        parts = [data[b : head + int(ends[k])] for k, b in zip(group, begins, strict=True)]
        codes = np.empty((len(group), self._count(coordinates, group[0])), np.uint8)
        for index, good in zip(group, self.decode_segments(parts, codes), strict=True):
            if not good:
                raise PayloadError(f"payload's {self.name} stream is corrupt in segment {index}")
        return codes

    def _ends(self, data: np.ndarray, coordinates: int) -> np.ndarray:
        """Return the segments' ends (int64), checked to ascend up to the end of the data."""
        count = self._segments(coordinates)
        if data.size < 4 * count:
            raise PayloadError(f"payload's {self.name} stream of {data.size} bytes is too short")
        ends = data[: 4 * count].view("<u4").astype(np.int64)
        rest = data.size - 4 * count - (int(ends[-1]) if count else 0)
        if not 0 <= rest <= PADDING or np.any(np.diff(ends) <= 0) or np.any(ends[:1] <= 0):
            raise PayloadError(f"payload's {self.name} stream has impossible offsets")
        if np.any(data[data.size - rest :]):
            raise PayloadError(f"payload's {self.name} stream is followed by bytes that are not 0")
        return ends


class HuffmanCoder(Coder):
    """Coder of blocks of codes by a book that all ranks share (coding/prefix_code.py)."""

    name = "huffman"
    fitted = True

    def __init__(self, packing: Packing, bucket_size: int, probabilities: Any) -> None:
        super().__init__(packing, bucket_size)
        self.book = PrefixCode.build(probabilities)
        self.fingerprint = self.book.fingerprint

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

    def __init__(
        self, packing: Packing, bucket_size: int, probabilities: np.ndarray | None = None
    ) -> None:
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
