"""Lossless coders: the words of a table scheme's codes, transcoded into a shorter stream and back.

A scheme's kernels write fixed-width or radix words as ever. Where ``coding=`` names a coder, those
words are unpacked, coded and thrown away, segment by segment, and a receiver makes the same words
again before it decodes them.

Stream, little-endian: a u32 for each segment, where its bytes end, counted from the first byte
behind these numbers; then the segments' bytes. Every segment is a stream of its own and begins at a
byte, so that segments are coded side by side and any range of coordinates alone. All but the last
have ``segment`` coordinates.

To add a coder: a subclass in a file of its own with ``make``, ``encode_segment``,
``decode_segment`` and the two bounds, an entry in coders.CODERS and a number in header.CODINGS.
"""

from __future__ import annotations

import functools
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from hvd_adaptive import kernels
from hvd_adaptive.errors import PayloadError
from hvd_adaptive.kernels.constants import LAST_END
from hvd_adaptive.kernels.fixed import BLOCK
from hvd_adaptive.kernels.packing import Packing
from hvd_adaptive.kernels.radix import row_coordinates
from hvd_adaptive.kernels.threads import mapped

# A segment has about so many coordinates, twice that at most: few enough for the second-level
# cache, so many that the 32 bits of its offset do not count.
SEGMENT = 1 << 16


def segment_size(packing: Packing, bucket_size: int) -> int:
    """Coordinates of a segment: whole words of each lane, and whole buckets where that fits."""
    unit = BLOCK
    if packing.digits > 1:
        unit = row_coordinates(packing.digits) * (32 // math.gcd(32, packing.width))
    both = math.lcm(unit, bucket_size)
    step = both if both <= 2 * SEGMENT else unit
    return max(1, SEGMENT // step) * step


class Coder(ABC):
    """Codes (uint8, each below the alphabet) to bytes and back; immutable, so threads share it.

    name: what ``coding=`` says.  fitted: whether it is made from the symbols' probabilities.
    """

    name: str = ""
    fitted: bool = False

    def __init__(self, packing: Packing, bucket_size: int) -> None:
        self.packing = packing
        self.segment = segment_size(packing, bucket_size)

    @classmethod
    def check(cls, symmetric: bool) -> None:
        """ValueError where it cannot code tables that are symmetric (without zero)."""
        return

    @classmethod
    @abstractmethod
    def make(
        cls, packing: Packing, bucket_size: int, probabilities: np.ndarray | None
    ) -> Coder | None:
        """The coder of a table; None where it needs probabilities (float64, ascending levels) and
        there are none yet: payloads are fixed then."""

    @property
    def fingerprint(self) -> int:
        """32 bits that differ between code books; 0 where there is but one."""
        return 0

    @abstractmethod
    def most_bytes(self, count: int) -> int:
        """Bytes that ``encode_segment`` may write for ``count`` codes, its slack included."""

    @abstractmethod
    def least_bytes(self, count: int) -> int:
        """The fewest bytes that ``count`` >= 1 codes of one segment can take."""

    @abstractmethod
    def encode_segment(self, codes: np.ndarray, out: np.ndarray) -> int:
        """Code ``codes`` (uint8) into ``out`` (uint8, most_bytes long); how many bytes it took."""

    @abstractmethod
    def decode_segment(self, data: np.ndarray, codes: np.ndarray) -> bool:
        """Fill ``codes`` (uint8) from ``data`` (uint8), which must be used up to its last byte, and
        whose unused bits must be 0; False where it is not so. Reads and writes nothing else."""

    def encode_segments(self, codes: np.ndarray, outs: np.ndarray) -> list[int]:
        """``encode_segment`` of the rows; a coder that is faster at two at a time overrides it."""
        return [self.encode_segment(*pair) for pair in zip(codes, outs, strict=True)]

    def decode_segments(self, data: Sequence[np.ndarray], codes: np.ndarray) -> list[bool]:
        """``decode_segment`` into the rows."""
        return [self.decode_segment(*pair) for pair in zip(data, codes, strict=True)]

    # The container -------------------------------------------------------------------------------

    def least_stream_bytes(self, coordinates: int) -> int:
        """The fewest bytes that a stream of so many coordinates can take."""
        whole, rest = divmod(coordinates, self.segment)
        least = whole * (4 + self.least_bytes(self.segment)) if whole else 0
        return least + (4 + self.least_bytes(rest) if rest else 0)

    def encode(self, words: torch.Tensor, coordinates: int, most: int) -> torch.Tensor | None:
        """Words (int32, packing.words(coordinates)) as a stream (uint8) of at most ``most`` bytes;
        None where it would be longer. With torch.get_num_threads() threads."""
        head = 4 * self._segments(coordinates)
        if head > most:
            return None
        most = min(most, head + LAST_END)
        source = words.cpu()
        out = np.empty(most, np.uint8)
        ends, at = out[:head].view("<u4"), 0
        code = functools.partial(self._coded, source, coordinates)
        groups = self._groups(coordinates)
        coded: Iterator[list[np.ndarray]] = mapped(code, groups, len(groups))
        parts = itertools.chain.from_iterable(coded)
        for index, part in enumerate(parts):
            if head + at + part.size > most:
                return None
            out[head + at : head + at + part.size] = part
            at += part.size
            ends[index] = at
        return torch.from_numpy(out[: head + at]).to(words.device)

    def decode(self, stream: torch.Tensor, coordinates: int) -> torch.Tensor:
        """Inverse of ``encode``: the words. PayloadError where the stream is not one of ours.

        stream: uint8, followed by up to 7 bytes of padding, which must be 0.
        """
        data = stream.cpu().numpy()
        ends = self._ends(data, coordinates, padding=7)
        words = self.packing.words(coordinates)
        out = torch.empty(words, dtype=torch.int32, device="cpu")
        pack = kernels.on_host("codes").pack

        def fill(group: range) -> None:
            rows = self._decoded(data, ends, coordinates, group)
            for index, codes in zip(group, rows, strict=True):
                own = out[self._words(index * self.segment) :]
                pack(torch.from_numpy(codes), self.packing, own)

        groups = self._groups(coordinates)
        for _ in mapped(fill, groups, len(groups)):
            pass
        return out.to(stream.device)

    def decode_range(
        self, stream: torch.Tensor, coordinates: int, first: int, last: int
    ) -> torch.Tensor:
        """The codes (uint8) of coordinates first to last - 1 alone, of a stream as ``decode`` takes
        it; only the segments that hold them are read."""
        if not 0 <= first <= last <= coordinates:
            raise ValueError(f"first={first}, last={last}: must be a range of {coordinates}")
        data = stream.cpu().numpy()
        ends = self._ends(data, coordinates, padding=7)
        touched = range(first // self.segment, -(-last // self.segment)) if last > first else ()
        parts = [self._decoded(data, ends, coordinates, range(k, k + 1))[0] for k in touched]
        at = touched[0] * self.segment if touched else 0
        codes = np.concatenate([np.empty(0, np.uint8), *parts])[first - at : last - at]
        return torch.from_numpy(codes).to(stream.device)

    def _segments(self, coordinates: int) -> int:
        return -(-coordinates // self.segment)

    def _count(self, coordinates: int, index: int) -> int:
        """Coordinates of a segment."""
        return min(self.segment, coordinates - index * self.segment)

    def _words(self, coordinates: int) -> int:
        """Where the words of the segment that begins with this coordinate begin."""
        return self.packing.words(coordinates)

    def _groups(self, coordinates: int) -> list[range]:
        """Segments by twos, as a thread takes them; all of a group have as many coordinates."""
        whole, count = coordinates // self.segment, self._segments(coordinates)
        groups = [range(k, min(k + 2, whole)) for k in range(0, whole, 2)]
        return groups if whole == count else [*groups, range(whole, count)]

    def _coded(self, words: torch.Tensor, coordinates: int, group: range) -> list[np.ndarray]:
        """The bytes of a group's segments; the buffers are new, since others may be waiting."""
        count = self._count(coordinates, group[0])
        codes = np.empty((len(group), count), np.uint8)
        outs = np.empty((len(group), self.most_bytes(count)), np.uint8)
        unpack = kernels.on_host("codes").unpack
        for index, row in zip(group, codes, strict=True):
            own = words[self._words(index * self.segment) :]
            unpack(own, self.packing, torch.from_numpy(row))
        sizes = self.encode_segments(codes, outs)
        return [out[:size] for out, size in zip(outs, sizes, strict=True)]

    def _decoded(
        self, data: np.ndarray, ends: np.ndarray, coordinates: int, group: range
    ) -> np.ndarray:
        """The codes of a group's segments, a row each."""
        head = 4 * len(ends)
        begins = [head + (int(ends[index - 1]) if index else 0) for index in group]
        parts = [data[b : head + int(ends[k])] for k, b in zip(group, begins, strict=True)]
        codes = np.empty((len(group), self._count(coordinates, group[0])), np.uint8)
        for index, good in zip(group, self.decode_segments(parts, codes), strict=True):
            if not good:
                raise PayloadError(f"payload's {self.name} stream is corrupt in segment {index}")
        return codes

    def _ends(self, data: np.ndarray, coordinates: int, padding: int) -> np.ndarray:
        """The segments' ends, checked: int64, ascending, the last one at the end of the data."""
        count = self._segments(coordinates)
        if data.size < 4 * count:
            raise PayloadError(f"payload's {self.name} stream of {data.size} bytes is too short")
        ends = data[: 4 * count].view("<u4").astype(np.int64)
        rest = data.size - 4 * count - (int(ends[-1]) if count else 0)
        if not 0 <= rest <= padding or np.any(np.diff(ends) <= 0) or np.any(ends[:1] <= 0):
            raise PayloadError(f"payload's {self.name} stream has impossible offsets")
        if np.any(data[data.size - rest :]):
            raise PayloadError(f"payload's {self.name} stream is followed by bytes that are not 0")
        return ends
