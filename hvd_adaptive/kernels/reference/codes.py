"""Pack codes into words and unpack them, in plain torch: see kernels/packing.py."""

from __future__ import annotations

import torch

from hvd_adaptive.kernels.constants import MASK32
from hvd_adaptive.kernels.packing import (
    BLOCK,
    LANES,
    QUARTERS,
    ROWS,
    Packing,
    check_words,
    partial_rows,
)


def pack(codes: torch.Tensor, packing: Packing, words: torch.Tensor) -> None:
    """Pack codes (uint8 (n,), below the alphabet) into the first packing.words(n) words (int32)."""
    words[: packing.words(codes.numel())] = pack_codes(codes.to(torch.int64), packing)


def unpack(words: torch.Tensor, packing: Packing, codes: torch.Tensor) -> None:
    """Invert ``pack``: fill ``codes`` (uint8, (n,)). Raise ValueError if the words are too few."""
    check_words(words, packing, codes)
    codes.copy_(unpack_codes(words, codes.numel(), packing))


def pack_codes(codes: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Pack codes (int64, (n,)) into words (int32, (packing.words(n),))."""
    digits, base, width = _unit(packing)
    powers = base ** torch.arange(digits, device=codes.device).view(-1, 1, 1)
    parts = []
    for blocks, rows in _blocks(codes.numel(), packing):
        filled = codes.new_zeros(blocks * rows * digits * LANES)
        own, codes = codes[: filled.numel()], codes[filled.numel() :]
        filled[: own.numel()] = own
        units = (_by_digit(filled, blocks, rows, packing) * powers).sum(dim=1)
        words = codes.new_zeros(blocks, -(-rows * width // 32), LANES)
        for row in range(rows):
            word, bit = divmod(row * width, 32)
            words[:, word] |= units[:, row] << bit & MASK32
            if bit + width > 32:
                words[:, word + 1] |= units[:, row] >> (32 - bit)
        parts.append(words.reshape(-1))
    packed = torch.cat(parts)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def unpack_codes(words: torch.Tensor, coordinates: int, packing: Packing) -> torch.Tensor:
    """Invert ``pack_codes``: return codes (int64, (coordinates,))."""
    digits, base, width = _unit(packing)
    powers = base ** torch.arange(digits, device=words.device).view(-1, 1, 1)
    wide, codes = words.to(torch.int64) & MASK32, []
    for blocks, rows in _blocks(coordinates, packing):
        count = -(-rows * width // 32)
        own, wide = wide[: blocks * count * LANES], wide[blocks * count * LANES :]
        streams = own.view(blocks, count, LANES)
        units = wide.new_zeros(blocks, rows, LANES)
        for row in range(rows):
            word, bit = divmod(row * width, 32)
            units[:, row] = streams[:, word] >> bit
            if bit + width > 32:
                units[:, row] |= streams[:, word + 1] << (32 - bit)
        units &= (1 << width) - 1
        part = wide.new_empty(blocks * rows * digits * LANES)
        _by_digit(part, blocks, rows, packing).copy_(units.unsqueeze(1) // powers % base)
        codes.append(part)
    return torch.cat(codes)[:coordinates]


def _unit(packing: Packing) -> tuple[int, int, int]:
    """Return the digits of a unit, their base, and the unit's bits."""
    if packing.digits == 1:
        return QUARTERS, 1 << packing.width, QUARTERS * packing.width
    return packing.digits, packing.alphabet, packing.width


def _blocks(coordinates: int, packing: Packing) -> list[tuple[int, int]]:
    """Return numbers of blocks, each with their rows, that hold so many coordinates in order."""
    if packing.digits == 1:
        return [(coordinates // BLOCK, ROWS), (1, partial_rows(coordinates % BLOCK))]
    return [(1, -(-coordinates // (LANES * packing.digits)))]


def _by_digit(codes: torch.Tensor, blocks: int, rows: int, packing: Packing) -> torch.Tensor:
    """Return a view of codes of whole blocks, (blocks, digits, rows, LANES)."""
    if packing.digits == 1:
        return codes.view(blocks, QUARTERS, rows, LANES)
    return codes.view(blocks, rows, packing.digits, LANES).transpose(1, 2)
