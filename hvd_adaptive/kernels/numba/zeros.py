"""Find, describe and leave out exact zeros in Numba, 64 coordinates at a time."""

from __future__ import annotations

import numpy as np
import torch

from hvd_adaptive.kernels.numba.bits import bits_at, lowest_one, next_one, ones_in, put_bits
from hvd_adaptive.kernels.numba.jit import inline, jit
from hvd_adaptive.kernels.zeros import Runs, mask_bytes, most_stream_bytes

# So many coordinates are searched before the search may end.
_BLOCK = 4096
_LOG = 6  # of the bits of a word
_U = np.uint64
_NONE, _ALL = _U(0), _U(2**64 - 1)


def has_zeros(flat):
    return bool(_has_zeros(flat.numpy().view(np.uint32)))


def mark(flat):
    mask = torch.empty(mask_bytes(flat.numel()), dtype=torch.uint8, device="cpu")
    zeros, runs = _mark(flat.numpy().view(np.uint32), _words(mask))
    return mask, Runs(flat.numel(), zeros, runs)


def write(mask, runs):
    stream = torch.zeros(most_stream_bytes(runs.coordinates), dtype=torch.uint8, device="cpu")
    bits = _write(_words(mask), *_numbers(runs), _words(stream))
    return stream[: bits // 8]


def read(stream, runs):
    mask = torch.empty(mask_bytes(runs.coordinates), dtype=torch.uint8, device="cpu")
    readable = _read(_words(stream), *_numbers(runs), runs.zeros, _words(mask))
    return mask if readable else None


def take(flat, mask, values):
    _take(flat.numpy(), _words(mask), values.numpy())


def put(values, mask, out, clear):
    _put(values.numpy(), _words(mask), out.numpy(), clear)


def _words(data: torch.Tensor) -> np.ndarray:
    return data.numpy().view(np.uint64)


def _numbers(runs: Runs) -> tuple[int, int, int, int]:
    return runs.coordinates, runs.runs, runs.gap_bits, runs.length_bits


@inline
def _is_zero(bits):
    return np.uint32(bits << np.uint32(1)) == 0


@jit
def _has_zeros(x):
    for begin in range(0, x.size, _BLOCK):
        part, found = x[begin : begin + _BLOCK], np.int32(0)
        for i in range(part.size):
            found += np.int32(_is_zero(part[i]))
        if found != 0:
            return True
    return False


@jit
def _mark(x, mask):
    """Fill the mask; return the number of zeros and of their runs."""
    zeros, runs, last = np.int64(0), np.int64(0), _U(1)
    for w in range(mask.size):
        part = x[64 * w : min(x.size, 64 * w + 64)]
        found = np.int32(0)
        for i in range(part.size):
            found += np.int32(_is_zero(part[i]))
        word = _ALL >> _U(64 - part.size)
        if found == part.size:
            word = _NONE
        elif found != 0:
            word = _NONE
            for i in range(part.size):
                word |= _U(not _is_zero(part[i])) << _U(i)
        mask[w] = word
        zeros += found
        if found != 0:
            ends = ~word & (_ALL >> _U(64 - part.size))
            runs += ones_in(ends & (word << _U(1) | last))
        last = word >> _U(63)
    return zeros, runs


@inline
def _put_number(words, low, at, number, width):
    """Store a number's low bits at ``low``, its quotient at ``at``; return the next places."""
    put_bits(words, _LOG, low, _U(number) & ((_U(1) << _U(width)) - _U(1)), width)
    at += number >> width
    put_bits(words, _LOG, at, _U(1), 1)
    return low + width, at + 1


@inline
def _write_edges(mask, n, words):
    """Do as ``_write`` if both parameters are 0.

    Then bit i of the stream is 1 if a run begins or ends before coordinate i.
    """
    last, end = _U(1), mask.size
    for w in range(mask.size):
        words[w] = mask[w] ^ (mask[w] << _U(1) | last)
        last = mask[w] >> _U(63)
    if mask[(n - 1) >> 6] >> _U((n - 1) & 63) & _U(1) == 0:
        words[n >> 6] |= _U(1) << _U(n & 63)
        end = (n >> 6) + 1
    elif n & 63:  # no run begins after the last coordinate
        words[n >> 6] &= ~(_U(1) << _U(n & 63))
    while words[end - 1] == 0:
        end -= 1
    return np.int64(64 * end)


@jit
def _write(mask, n, runs, gap_bits, length_bits, words):
    """Fill the words, which are zeros; return the number of bits up to the end of a word."""
    if gap_bits + length_bits == 0:
        return _write_edges(mask, n, words)
    low, at = np.int64(0), np.int64(runs * (gap_bits + length_bits))
    start, end, last = np.int64(-1), np.int64(-1), _U(1)
    for w in range(mask.size):
        word = mask[w]
        edges = word ^ (word << _U(1) | last)
        last = word >> _U(63)
        while edges != 0:
            place = 64 * w + lowest_one(edges)
            edges &= edges - _U(1)
            if place >= n:
                break
            if start <= end:
                number, width = place - end - 1, gap_bits
                start = place
            else:
                number, width = place - start - 1, length_bits
                end = place
            low, at = _put_number(words, low, at, number, width)
    if start > end:
        _, at = _put_number(words, low, at, n - start - 1, length_bits)
    return (at + 63) // 64 * 64


@inline
def _clear(mask, begin, end):
    """Clear bits ``begin`` < ``end``."""
    first, last = begin >> 6, (end - 1) >> 6
    head = _ALL << _U(begin & 63)
    tail = _ALL >> _U(63 - ((end - 1) & 63))
    if first == last:
        mask[first] &= ~(head & tail)
        return
    mask[first] &= ~head
    for w in range(first + 1, last):
        mask[w] = _NONE
    mask[last] &= ~tail


@inline
def _read_edges(words, n, runs, zeros, mask):
    """Do as ``_read`` if both parameters are 0: see ``_write_edges``."""
    end = n >> 6
    if words.size > end + 1 or words[words.size - 1] == 0:
        return False
    if words.size == end + 1 and words[end] >> _U(n & 63) > 1:
        return False  # a run begins or ends after the last coordinate
    edges, others, before = np.int64(0), np.int64(0), _ALL
    for w in range(mask.size):
        word = words[w] if w < words.size else _NONE
        edges += ones_in(word)
        for shift in range(6):
            word ^= word << _U(1 << shift)
        word ^= before
        before = _ALL if word >> _U(63) == 1 else _NONE
        if w == end:
            word &= (_U(1) << _U(n & 63)) - _U(1)
        mask[w] = word
        others += ones_in(word)
    if words.size > mask.size:
        edges += 1
    return edges == 2 * runs and others == n - zeros


@jit
def _read(words, n, runs, gap_bits, length_bits, zeros, mask):
    """Fill the mask; return whether the words are the stream of such runs."""
    bits, low, at = 64 * words.size, np.int64(0), np.int64(runs * (gap_bits + length_bits))
    if at + 2 * runs > bits:
        return False
    if at == 0:
        return _read_edges(words, n, runs, zeros, mask)
    mask[:] = _ALL
    if n & 63:
        mask[mask.size - 1] = _ALL >> _U(64 - (n & 63))
    end, cleared = np.int64(-1), np.int64(0)
    for _ in range(runs):
        one = next_one(words, at)
        if one >= bits or one - at > n >> gap_bits:
            return False
        start = end + ((one - at) << gap_bits) + bits_at(words, _LOG, low, gap_bits) + 1
        low, at = low + gap_bits, one + 1
        one = next_one(words, at)
        if one >= bits or one - at > zeros >> length_bits:
            return False
        length = ((one - at) << length_bits) + bits_at(words, _LOG, low, length_bits) + 1
        low, at = low + length_bits, one + 1
        if start > n or length > n - start:
            return False
        end = start + length
        cleared += length
        _clear(mask, start, end)
    return cleared == zeros and (at - 1) >> 6 == words.size - 1 and next_one(words, at) == bits


@jit
def _take(x, mask, values):
    at = np.int64(0)
    for w in range(mask.size):
        word = mask[w]
        if word == _ALL:
            part, target = x[64 * w : 64 * w + 64], values[at : at + 64]
            for i in range(64):
                target[i] = part[i]
            at += 64
        while word != 0 and word != _ALL:
            values[at] = x[64 * w + lowest_one(word)]
            word &= word - _U(1)
            at += 1


@jit
def _put(values, mask, out, clear):
    at = np.int64(0)
    for w in range(mask.size):
        word = mask[w]
        if clear and word != _ALL:
            out[64 * w : min(out.size, 64 * w + 64)] = np.float32(0)
        if word == _ALL:
            part, target = values[at : at + 64], out[64 * w : 64 * w + 64]
            for i in range(64):
                target[i] = part[i]
            at += 64
        while word != 0 and word != _ALL:
            out[64 * w + lowest_one(word)] = values[at]
            word &= word - _U(1)
            at += 1
