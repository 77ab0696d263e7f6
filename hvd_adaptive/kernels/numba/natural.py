"""Compress naturally in Numba, on the bits of the floats."""

from __future__ import annotations

import numba
import numpy as np

from hvd_adaptive.kernels.constants import INFINITE, LARGEST, NAN
from hvd_adaptive.kernels.numba.codes import load_fixed, store_fixed
from hvd_adaptive.kernels.numba.decoder import addresses, pointer, scale_by
from hvd_adaptive.kernels.numba.jit import inline, jit
from hvd_adaptive.kernels.numba.random import STEPS, bucket_key, counter_of, uniform24
from hvd_adaptive.kernels.numba.scan import largest_bits
from hvd_adaptive.kernels.packing import BLOCK, LANES, ONE_BIT

_INFINITE, _LARGEST, _NAN = np.uint32(INFINITE), np.uint32(LARGEST), np.uint32(NAN)
_FRACTION = np.uint32(0xFFFFFF)
_MINUS_ZERO = np.uint32(0x80000000)


def encode(flat, exponents, words, bucket_size, key):
    unsigned = words.numpy().view(np.uint32)
    _encode(flat.numpy(), exponents.numpy(), unsigned, bucket_size, np.uint64(key))


def decode_add(payloads, factor, out):
    n = out.numel()
    sections = addresses(payloads, "exponents", n, ONE_BIT.words(n))
    _decode_add(*sections, np.float32(factor), out.numpy())


@inline
def _round(run, offset, high, exponents, signs):
    for j in range(run.size):
        bits = run[j]
        fraction = np.float32(np.int32(np.uint32(bits << np.uint32(1)) & _FRACTION))
        up = np.uint32(uniform24(np.uint32(STEPS[j] + offset), high) < fraction)
        field = np.uint32(np.uint32(bits >> np.uint32(23)) & np.uint32(0xFF))
        exponent = np.uint32(field + up)
        exponents[j] = np.uint8(exponent)
        sign = np.uint32(bits >> np.uint32(31))
        signs[j] = np.uint32(0) if exponent == 0 else sign


@jit
def _encode(x, exponents, words, bucket_size, stream):
    signs, units = np.empty(BLOCK, np.uint32), np.empty(LANES, np.uint32)
    bits = x.view(np.uint32)
    for b in range((x.size + bucket_size - 1) // bucket_size):
        begin = b * bucket_size
        end = min(x.size, begin + bucket_size)
        finite = largest_bits(x[begin:end]) < _INFINITE
        low, high = bucket_key(stream, b)
        i = begin
        while i < end:
            at = i % BLOCK
            stop = min(end, i - at + BLOCK)
            part, target = signs[at : at + stop - i], exponents[i:stop]
            if finite:
                _round(bits[i:stop], counter_of(i - begin, low), high, target, part)
            else:
                target[:] = np.uint8(0)
                part[:] = np.uint32(1)
            if stop % BLOCK == 0 or stop == x.size:
                index = (stop - 1) // BLOCK
                store_fixed(signs, index, stop - index * BLOCK, 1, units, words)
            i = stop


@inline
def _add(exponents, signs, target):
    for j in range(target.size):
        exponent = np.uint32(exponents[j])
        bits = np.uint32(exponent << np.uint32(23))
        bits = _LARGEST if exponent == np.uint32(255) else bits
        bits = np.uint32(bits | np.uint32(signs[j] << np.uint32(31)))
        bits = _NAN if bits == _MINUS_ZERO else bits
        target[j] += np.uint32(bits).view(np.float32)


@jit
def _decode_add(exponents_at, words_at, size, factor, out):
    signs = np.empty(BLOCK, np.uint32)
    for index in range((out.size + BLOCK - 1) // BLOCK):
        begin = index * BLOCK
        end = min(out.size, begin + BLOCK)
        target = out[begin:end]
        for rank in range(words_at.size):
            exponents = numba.carray(pointer(exponents_at[rank]), out.size, np.uint8)
            words = numba.carray(pointer(words_at[rank]), size, np.uint32)
            load_fixed(words, index, end - begin, 1, signs)
            _add(exponents[begin:end], signs, target)
        if factor != 1:
            scale_by(factor, target)
