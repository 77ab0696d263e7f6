"""Dithered bodies, made and read by Numba's kernels and by the reference: the same bytes, the same
sums, the same refusals. Bare codes alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from kernel_cases import heavy, ordinary, vector, with_nan, zeros

from hvd_adaptive.base.errors import PayloadError
from hvd_adaptive.codec.dithered_code import gaussian_code
from hvd_adaptive.kernels import dithered, module
from hvd_adaptive.kernels.dithered import CODED, most_bytes
from hvd_adaptive.kernels.packing import Packing, packing_of

KEY, SEGMENT = (1 << 63) + 5, 256
BACKENDS = ("numba", "reference")


def padded(body: torch.Tensor) -> torch.Tensor:
    return torch.cat([body, body.new_zeros(-body.numel() % 8)])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def flat_of(n: int) -> torch.Tensor:
    return torch.cat([vector(kind, n // 4) for kind in (heavy, zeros, with_nan, heavy)])


class Dithered:
    """Bodies of ECDQ with steps of ``delta``. expected: the law of four symbols that books are made
    for, so that most integers escape."""

    def __init__(self, delta: float, expected: Sequence[float] = (), width: int = 2) -> None:
        self.code, self.width = gaussian_code(None, delta), width
        if expected:
            law = np.tile(expected, (len(self.code.probabilities), 1))
            self.code = dataclasses.replace(self.code, probabilities=law)

    def encode(self, backend: str, flat: torch.Tensor, bucket: int) -> torch.Tensor:
        room = torch.zeros(most_bytes(flat.numel(), bucket, self.width), dtype=torch.uint8)
        kernels, own = module(backend, "ecdq"), (self.code, KEY, self.width)
        return room[: dithered.encode_body(kernels, flat, bucket, *own, room, SEGMENT)]

    def add(self, backend: str, bodies: list, bucket: int, out: torch.Tensor) -> None:
        kernels, own = module(backend, "ecdq"), (self.code, [KEY] * len(bodies), self.width)
        assert dithered.add_bodies(kernels, bodies, bucket, *own, out, SEGMENT) is None


KINDS = {
    "coded": lambda: Dithered(1.5),
    "escaped": lambda: Dithered(0.5, (0.25, 0.25, 0.25, 0.25)),
    "integers": lambda: Dithered(1 / 64, (1e-6, 1.0, 1e-6, 1e-6)),
    "wide": lambda: Dithered(1 / 64, width=4),
}


@pytest.mark.many
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "bucket"), [(4, 4), (400, 100), (1236, 64)])
@pytest.mark.parametrize("broken", (True, False), ids=("with NaN and zeros", "finite"))
def test_bytes_and_sums_agree(kind: str, n: int, bucket: int, broken: bool):
    scheme, flat = KINDS[kind](), flat_of(n) if broken else vector(ordinary, n)
    body, other = (scheme.encode(backend, flat, bucket) for backend in BACKENDS)
    assert torch.equal(body, other)
    sums = [torch.linspace(-1, 1, n) for _ in BACKENDS]
    for backend, out in zip(BACKENDS, sums, strict=True):
        scheme.add(backend, [padded(body)] * 2, bucket, out)
    assert same(*sums)


def test_both_kinds_of_dithered_bodies_are_met():
    flat, names = vector(ordinary, 400), ("coded", "escaped", "integers")
    kinds = [int(KINDS[name]().encode("reference", flat, 100)[0]) for name in names]
    assert kinds == [CODED, CODED, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_what_one_refuses_the_other_refuses(kind: str):
    scheme, flat, verdicts = KINDS[kind](), vector(heavy, 300), []
    body = padded(scheme.encode("numba", flat, 64))
    rng = np.random.default_rng(7)
    for _ in range(60):
        bad = body.clone()
        bad[int(rng.integers(0, bad.numel()))] ^= 1 << int(rng.integers(0, 8))
        if rng.random() < 0.2:
            bad = bad[: 24 + int(rng.integers(0, bad.numel() - 24)) // 8 * 8].clone()
        sums, refused = [torch.zeros(300) for _ in BACKENDS], []
        for backend, out in zip(BACKENDS, sums, strict=True):
            try:
                scheme.add(backend, [bad], 64, out)
                refused.append(None)
            except PayloadError as error:
                refused.append(str(error))
        assert refused[0] == refused[1]
        assert refused[0] or same(*sums)
        verdicts.append(refused[0] is None)
    assert not all(verdicts)


@pytest.mark.parametrize("alphabet", (2, 3, 8, 256))
def test_bare_codes_agree(alphabet: int):
    packing = packing_of(alphabet)
    codes = torch.randint(0, alphabet, (1207,), generator=torch.Generator().manual_seed(1))
    codes = codes.to(torch.uint8)
    for backend in BACKENDS:
        words = torch.full((packing.words(1207),), 0x555, dtype=torch.int32)
        module(backend, "codes").pack(codes, packing, words)
        for reader in BACKENDS:
            found = torch.empty_like(codes)
            module(reader, "codes").unpack(words, packing, found)
            assert torch.equal(found, codes)
            with pytest.raises(ValueError, match="too short"):
                module(reader, "codes").unpack(words[:-1], packing, found)


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
