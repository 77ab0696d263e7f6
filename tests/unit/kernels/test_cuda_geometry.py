"""Where the Triton kernels read and write, beyond 2**31 coordinates too."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton_interpreter import DEVICE
from unit_oracles import UNITS, word_count

import hvd_adaptive.kernels
from hvd_adaptive.kernels.packing import packing_of
from hvd_adaptive.kernels.triton.launch import launch
from hvd_adaptive.kernels.triton.layout import (
    bucket_under,
    coordinate,
    coordinates_left,
    crossed,
    layout_of,
    magic,
    words_left,
)

FAR = 5 * (1 << 31)


@triton.jit(do_not_specialize=["first", "n", "bucket_size", "magic", "lane_words"])
def probe(
    out,
    words,
    first: tl.int64,
    n: tl.int64,
    bucket_size: tl.int64,
    magic: tl.int64,
    lane_words: tl.int64,
    LAYOUT: tl.constexpr,
):
    """Of two segments from ``first`` on: the bucket and the place in it of each coordinate (-1 if
    it is not there), under [digit of row k, segment and lane], and the words of each lane."""
    ROWS: tl.constexpr = LAYOUT.rows
    DIGITS: tl.constexpr = LAYOUT.digits
    thread = tl.arange(0, 32)
    segment = first.to(tl.int64) + thread // 16
    bucket, within = bucket_under(segment, bucket_size, LAYOUT.coordinates)
    left = coordinates_left(segment, n, LAYOUT.coordinates)
    tl.store(words + thread, words_left(segment, lane_words, ROWS * LAYOUT.width // 32))
    for k in tl.static_range(ROWS):
        for digit in tl.static_range(DIGITS):
            place, i, there = coordinate(k, digit, segment, left, thread % 16, LAYOUT)
            over = crossed(place, within, bucket_size, magic, LAYOUT.buckets)
            at = out + ((k * DIGITS + digit) * 32 + thread) * 3
            tl.store(at, tl.where(there, i, -1))
            tl.store(at + 1, bucket + over)
            tl.store(at + 2, within + place - over * bucket_size)


def probed(alphabet: int, first: int, n: int, bucket: int) -> tuple[np.ndarray, np.ndarray]:
    packing = packing_of(alphabet)
    layout = layout_of(packing, bucket)
    out = torch.zeros(layout.rows, layout.digits, 2, 16, 3, dtype=torch.int64, device=DEVICE)
    words = torch.zeros(2, 16, dtype=torch.int32, device=DEVICE)
    place = first, n, bucket, magic(bucket), packing.words(n) // 16
    launch(probe, 1, out, out, words, *place, LAYOUT=layout, num_warps=1)
    return out.cpu().numpy(), words.cpu().numpy()


def coordinate_of(alphabet: int, n: int, segment: int, row: int, digit: int, lane: int) -> int:
    """As the docstrings of kernels/packing.py says; -1 beyond the last one."""
    if alphabet in UNITS:
        digits, width = UNITS[alphabet]
        rows = max(8, 32 // np.gcd(width, 32))
        i = ((segment * rows + row) * digits + digit) * 16 + lane
    else:
        rest = min(512, n - 512 * segment)
        rows = -(-rest // 64)  # of each quarter
        if row >= rows:
            return -1
        i = 512 * segment + (digit * rows + row) * 16 + lane
    return int(i) if i < n else -1


@pytest.mark.parametrize("alphabet", [8, 9])
@pytest.mark.parametrize("bucket", [1, 100, 512, 1300, 3 * (1 << 31) + 1])
def test_coordinates_buckets_and_words(alphabet: int, bucket: int):
    """The last two segments of a tensor of more than 2**33 coordinates."""
    n = FAR + 300
    size = layout_of(packing_of(alphabet), 100).coordinates
    first = n // size - 1
    got, words = probed(alphabet, first, n, bucket)
    rows, digits = got.shape[:2]
    for row in {0, 1, rows - 1}:
        for digit in {0, digits - 1}:
            for segment in (0, 1):
                for lane in (0, 3, 15):
                    i, own, within = got[row, digit, segment, lane].tolist()
                    want = coordinate_of(alphabet, n, first + segment, row, digit, lane)
                    assert i == want
                    if want >= 0:
                        assert (own, within) == divmod(want, bucket)
    before = word_count(first * size, alphabet) // 16
    assert words[0].tolist() == [word_count((first + 1) * size, alphabet) // 16 - before] * 16
    assert words[0, 0] + words[1, 0] == word_count(n, alphabet) // 16 - before


def test_each_coordinate_is_met_once():
    for alphabet, n in ((8, 700), (9, 1500)):
        got, _ = probed(alphabet, 0, n, 100)
        there = np.sort(got[..., 0].ravel())
        size = layout_of(packing_of(alphabet), 100).coordinates
        assert there[there >= 0].tolist() == list(range(min(n, 2 * size)))


def test_division_by_short_buckets():
    """``crossed`` divides by multiplying: all numbers that it meets."""
    t = np.arange(1 << 14, dtype=np.uint64)
    for bucket in [*range(1, 600), 1000, 4095, 4096, 5631]:
        assert np.array_equal((2 * t + 1) * np.uint64(magic(bucket)) >> np.uint64(32), t // bucket)


def test_programs_count_in_64_bits():
    """A program's number is widened before anything is multiplied with it."""
    found = 0
    for path in Path(hvd_adaptive.kernels.__file__).parent.glob("triton/*.py"):
        text = path.read_text()
        uses = re.findall(r" = tl\.program_id\(\d\)(.{0,13})", text)
        found += len(uses)
        assert all(use.startswith(".to(tl.int64)") for use in uses), path.name
    assert found >= 5
