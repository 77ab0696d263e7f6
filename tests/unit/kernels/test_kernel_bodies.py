"""Dithered bodies hold the kernels' integers, whatever their form. Bare codes of both backends."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from kernel_cases import heavy, ordinary, placed, same_bits, vector, with_nan, zeros

from hvd_adaptive.codec.dithered_code import DitheredCode, gaussian_code
from hvd_adaptive.kernels import dithered, module
from hvd_adaptive.kernels.dithered import CODED, most_bytes
from hvd_adaptive.kernels.numba import ecdq
from hvd_adaptive.kernels.packing import Packing, packing_of
from hvd_adaptive.kernels.reference.codes import pack_codes

KEY = (1 << 63) + 5


def code_of(delta: float, expected: Sequence[float] = ()) -> DitheredCode:
    """expected: the law of four symbols that books are made for, so that most integers escape."""
    code = gaussian_code(None, delta)
    if not expected:
        return code
    law = np.tile(expected, (len(code.probabilities), 1))
    return dataclasses.replace(code, probabilities=law)


# Code, bytes of an integer, and kind of a body.
KINDS = {
    "coded": (code_of(1.5), 2, CODED),
    "escaped": (code_of(0.5, (0.25, 0.25, 0.25, 0.25)), 2, CODED),
    "integers": (code_of(1 / 64, (1e-6, 1.0, 1e-6, 1e-6)), 2, 2),
    "wide": (code_of(1 / 64), 4, CODED),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "bucket"), [(4, 4), (400, 100), (1236, 64)])
@pytest.mark.parametrize("broken", (True, False), ids=("with NaN and zeros", "finite"))
def test_bodies_add_the_values_of_their_integers(
    kind: str, n: int, bucket: int, broken: bool, monkeypatch
):
    monkeypatch.setattr(dithered, "SEGMENT", 256)
    parts = (heavy, zeros, with_nan, heavy) if broken else (ordinary,)
    flat = torch.cat([vector(part, n // len(parts)) for part in parts])
    code, width, told = KINDS[kind]
    room = torch.zeros(most_bytes(n, bucket, width), dtype=torch.uint8)
    body = room[: dithered.encode_body(flat, bucket, code, KEY, width, room)]
    assert n < 400 or broken or int(body[0]) == told
    padded = torch.cat([body, body.new_zeros(-body.numel() % 8)])
    sums, wanted = torch.linspace(-1, 1, n), torch.linspace(-1, 1, n)
    dithered.add_bodies([padded] * 2, bucket, code, [KEY] * 2, width, sums)
    steps = ecdq.bucket_steps(flat.numpy(), bucket, code.delta)
    q = ecdq.quantize(flat.numpy(), steps, bucket, KEY)
    for _ in range(2):
        ecdq.add(q, steps, bucket, KEY, wanted.numpy())
    assert same_bits(sums, wanted)


@pytest.mark.parametrize("alphabet", (2, 3, 8, 256))
@pytest.mark.parametrize("backend", ("reference", "numba", "triton"))
def test_bare_codes(backend: str, alphabet: int):
    packing, generator = packing_of(alphabet), torch.Generator().manual_seed(1)
    codes = torch.randint(0, alphabet, (1207,), generator=generator, dtype=torch.uint8)
    words = torch.full((packing.words(1207),), 0x555, dtype=torch.int32)
    own, words, found = placed(backend, codes, words, torch.empty_like(codes))
    kernels = module(backend, "codes")
    kernels.pack(own, packing, words)
    assert torch.equal(words.cpu(), pack_codes(codes.to(torch.int64), packing))
    kernels.unpack(words, packing, found)
    assert torch.equal(found.cpu(), codes)
    with pytest.raises(ValueError, match="too short"):
        kernels.unpack(words[:-1], packing, found)


@pytest.mark.parametrize("alphabet", (3, 7, 12, 23))
def test_every_unit_is_split_into_its_codes(alphabet: int):
    """The extreme units, those about powers of the alphabet, and forged ones of more codes."""
    packing = packing_of(alphabet)
    most, end = alphabet**packing.digits, 1 << packing.width
    powers = [alphabet**digit for digit in range(packing.digits)]
    units = [0, most - 1, *powers, *(power - 1 for power in powers), *(most - p for p in powers)]
    units += np.random.default_rng(1).integers(0, most, 5000).tolist()
    for at in range(0, len(units), 16):
        lanes = np.zeros(16, np.uint32)
        lanes[: len(units[at : at + 16])] = units[at : at + 16]
        digits = lanes.astype(object)[None, :] // np.array(powers, object)[:, None] % alphabet
        assert np.array_equal(unpacked(packing, lanes), digits.astype(np.uint8))
    for unit in {most, end - 1} if most < end else ():
        assert unpacked(packing, np.full(16, unit, np.uint32)).max() < alphabet


def unpacked(packing: Packing, lanes: np.ndarray) -> np.ndarray:
    """Return the codes of one row of units, (digits, 16)."""
    codes = torch.empty(16 * packing.digits, dtype=torch.uint8)
    words = torch.from_numpy(lanes.view(np.int32))
    module("numba", "codes").unpack(words, packing, codes)
    return codes.numpy().reshape(packing.digits, 16)
