"""Pack codes in plain torch: fixed width (kernels/fixed.py) and radix (kernels/radix.py)."""

from __future__ import annotations

import torch

from hvd_adaptive.kernels.constants import MASK32
from hvd_adaptive.kernels.fixed import BLOCK, LANES, QUARTERS, ROWS, packed_words, partial_rows
from hvd_adaptive.kernels.packing import Packing


def pack_codes(codes: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Pack codes (int64, (n,)) into words (int32, (packing.words(n),))."""
    if packing.digits == 1:
        return pack(codes, packing.width)
    return pack_radix(codes, packing)


def unpack_codes(words: torch.Tensor, coordinates: int, packing: Packing) -> torch.Tensor:
    """Invert ``pack_codes``: return codes (int64, (coordinates,))."""
    if packing.digits == 1:
        return unpack(words, coordinates, packing.width)
    return unpack_radix(words, coordinates, packing)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes (int64, (n,)) into words (int32), laid out as in kernels/fixed.py."""
    full = codes.numel() // BLOCK * BLOCK
    parts = [_pack_blocks(codes[:full].view(-1, QUARTERS, ROWS, LANES), bits)]
    rest = codes.numel() - full
    if rest:
        rows = partial_rows(rest)
        padded = codes.new_zeros(QUARTERS * rows * LANES)
        padded[:rest] = codes[full:]
        parts.append(_pack_blocks(padded.view(1, QUARTERS, rows, LANES), bits))
    return torch.cat(parts)


def _pack_blocks(codes: torch.Tensor, bits: int) -> torch.Tensor:
    blocks, _, rows, _ = codes.shape
    count = -(-rows * QUARTERS * bits // 32)
    words = codes.new_zeros(blocks, count, LANES)
    for row in range(rows):
        for quarter in range(QUARTERS):
            word, bit = divmod((QUARTERS * row + quarter) * bits, 32)
            shifted = codes[:, quarter, row] << bit
            words[:, word] |= shifted & MASK32
            if bit + bits > 32:
                words[:, word + 1] |= shifted >> 32
    return _to_int32(words).reshape(-1)


def unpack(words: torch.Tensor, coordinates: int, bits: int) -> torch.Tensor:
    """Invert ``pack``: return codes (int64, (coordinates,))."""
    full = coordinates // BLOCK * BLOCK
    split = packed_words(full, bits)
    parts = [_unpack_blocks(words[:split].view(-1, bits, LANES), ROWS, bits)]
    rest = coordinates - full
    if rest:
        rows = partial_rows(rest)
        tail = words[split : packed_words(coordinates, bits)].view(1, -1, LANES)
        parts.append(_unpack_blocks(tail, rows, bits)[:rest])
    return torch.cat(parts)


def _unpack_blocks(words: torch.Tensor, rows: int, bits: int) -> torch.Tensor:
    wide = words.to(torch.int64) & MASK32
    codes = wide.new_zeros(wide.shape[0], QUARTERS, rows, LANES)
    for row in range(rows):
        for quarter in range(QUARTERS):
            word, bit = divmod((QUARTERS * row + quarter) * bits, 32)
            value = wide[:, word] >> bit
            if bit + bits > 32:
                value = value | wide[:, word + 1] << (32 - bit)
            codes[:, quarter, row] = value & ((1 << bits) - 1)
    return codes.reshape(-1)


def pack_radix(codes: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Pack codes (int64, (n,)) into words (int32), laid out as in kernels/radix.py."""
    row = LANES * packing.digits
    rows = -(-codes.numel() // row)
    padded = codes.new_zeros(rows * row)
    padded[: codes.numel()] = codes
    powers = packing.alphabet ** torch.arange(packing.digits, device=codes.device)
    units = (padded.view(rows, packing.digits, LANES) * powers.view(1, -1, 1)).sum(dim=1)
    words = codes.new_zeros(packing.words(codes.numel()) // LANES, LANES)
    for k in range(rows):
        word, bit = divmod(k * packing.width, 32)
        words[word] |= units[k] << bit & MASK32
        if bit + packing.width > 32:
            words[word + 1] |= units[k] >> (32 - bit)
    return _to_int32(words).reshape(-1)


def unpack_radix(words: torch.Tensor, coordinates: int, packing: Packing) -> torch.Tensor:
    """Invert ``pack_radix``."""
    wide = words.to(torch.int64).view(-1, LANES) & MASK32
    rows = -(-coordinates // (LANES * packing.digits))
    units = wide.new_zeros(rows, LANES)
    for k in range(rows):
        word, bit = divmod(k * packing.width, 32)
        units[k] = wide[word] >> bit
        if bit + packing.width > 32:
            units[k] |= wide[word + 1] << (32 - bit)
    units &= (1 << packing.width) - 1
    powers = packing.alphabet ** torch.arange(packing.digits, device=words.device)
    digits = units.unsqueeze(1) // powers.view(1, -1, 1) % packing.alphabet
    return digits.reshape(-1)[:coordinates]


def _to_int32(words: torch.Tensor) -> torch.Tensor:
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
