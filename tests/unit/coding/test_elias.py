"""coding="elias": streams bit by bit, lengths, hostile streams, payloads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from unit_oracles import omega as text
from wire_decoder import bits_of, elias_segment

from hvd_adaptive import QSGD, PayloadError
from hvd_adaptive.coding.coders import EliasCoder
from hvd_adaptive.kernels.numba import elias as cpu_elias
from hvd_adaptive.kernels.numba.codes import pack
from hvd_adaptive.kernels.omega import code_length
from hvd_adaptive.kernels.packing import packing_of
from hvd_adaptive.theory import sparse_code_bits

ALPHABETS = (3, 5, 7, 15, 31, 255)
GUARD = 170


def coder_of(alphabet: int, bucket_size: int = 8192) -> EliasCoder:
    return EliasCoder(packing_of(alphabet), bucket_size)


def some_codes(rng, count: int, alphabet: int, density: float) -> np.ndarray:
    """Nonzero with this probability, small levels more often."""
    zero = alphabet // 2
    levels = np.minimum(rng.geometric(0.6, count), zero) * rng.choice([-1, 1], count)
    levels = np.where(rng.random(count) < 0.1, rng.integers(-zero, zero + 1, count), levels)
    return np.where(rng.random(count) < density, zero + levels, zero).astype(np.uint8)


def stream(codes: np.ndarray, alphabet: int) -> bytes:
    """What docs/wire_format.md says."""
    out, run = "", 0
    for code in codes.tolist():
        run, level = run + 1, code - alphabet // 2
        if level:
            out += text(run) + ("1" if level < 0 else "0") + text(abs(level))
            run = 0
    out += text(run + 1) if run else ""
    out += "0" * (-len(out) % 8)
    return bytes(int(out[i : i + 8], 2) for i in range(0, len(out), 8))


def encode(codes: np.ndarray, alphabet: int) -> bytes:
    """Nothing behind the room that the coder asks for is touched."""
    room = coder_of(alphabet).most_bytes(codes.size)
    out = np.full(room + 16, GUARD, np.uint8)
    used = cpu_elias.encode(codes, alphabet, out[:room])
    assert (out[room:] == GUARD).all() and used <= room - cpu_elias.SLACK
    return out[:used].tobytes()


def decode(data: bytes, alphabet: int, count: int) -> np.ndarray | None:
    """The codes, None where the stream is refused; nothing around them is touched."""
    around = np.full(count + 64, GUARD, np.uint8)
    good = cpu_elias.decode(np.frombuffer(data, np.uint8), alphabet, around[32 : 32 + count])
    assert (around[:32] == GUARD).all() and (around[32 + count :] == GUARD).all()
    return around[32 : 32 + count] if good else None


def check(codes: np.ndarray, alphabet: int) -> None:
    expected = stream(codes, alphabet)
    coder = coder_of(alphabet)
    assert codes.size == 0 or coder.least_bytes(codes.size) <= len(expected)
    assert encode(codes, alphabet) == expected
    np.testing.assert_array_equal(decode(expected, alphabet, codes.size), codes)


@pytest.mark.many
@pytest.mark.parametrize("alphabet", ALPHABETS)
@pytest.mark.parametrize("density", (0.0, 0.004, 0.05, 0.4, 1.0))
def test_streams_are_as_told(alphabet, density):
    rng = np.random.default_rng(alphabet)
    for count in (0, 1, 2, 3, 7, 8, 15, 16, 17, 511, 4095, 4096, 4097, 9000):
        check(some_codes(rng, count, alphabet, density), alphabet)


@pytest.mark.parametrize("place", (0, 65_535, 131_071))
def test_one_nonzero_in_the_longest_segment(place):
    for alphabet, code in ((3, 0), (255, 254)):
        codes = np.full(131_072, alphabet // 2, np.uint8)
        codes[place] = code
        check(codes, alphabet)


def test_the_worst_segment_fills_its_room():
    for alphabet in ALPHABETS:
        codes = np.full(1000, alphabet - 1, np.uint8)
        used = len(encode(codes, alphabet))
        assert coder_of(alphabet).most_bytes(1000) == used + cpu_elias.SLACK
    # No distance takes more than so many records of distance 1.
    for distance in range(1, 5000):
        assert code_length(distance) <= distance * 3 - 2


def test_fewest_bytes():
    """Against the least of all streams of so many coordinates, by dynamic programming."""
    distances = [0, *(len(text(k)) for k in range(1, 402))]
    best = [0]  # bits up to a nonzero coordinate at place n, all of the least level
    for n in range(1, 400):
        best.append(min(best[m] + distances[n - m] + 2 for m in range(n)))
    for n in range(1, 400):
        ended = min(best[m] + distances[n + 1 - m] for m in range(n))
        assert coder_of(3).least_bytes(n) == -(-min(best[n], ended) // 8)


def verdicts(data: bytes, alphabet: int, count: int) -> bool:
    """The decoder gives the codes whose only stream this is, or refuses, if there are none."""
    got = decode(data, alphabet, count)
    if got is None:
        try:
            told = elias_segment(bits_of(data, "big"), count, alphabet)
        except (AssertionError, IndexError, OverflowError, StopIteration, ValueError):
            return False
        assert told.min() < 0 or told.max() >= alphabet or stream(told, alphabet) != data
        return False
    assert got.max(initial=0) < alphabet and stream(got, alphabet) == data
    return True


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40), st.sampled_from((3, 7, 255)), st.integers(0, 300))
def test_any_bytes(data, alphabet, count):
    verdicts(data, alphabet, count)


def test_mutated_streams():
    """Flipped, cut, lengthened, of another number of coordinates or levels; some are streams."""
    rng, accepted = np.random.default_rng(5), 0
    for trial in range(1500):
        alphabet = int(rng.choice((3, 7, 127)))
        count = int(rng.integers(1, 120))
        data = bytearray(stream(some_codes(rng, count, alphabet, rng.random()), alphabet))
        if trial % 2:
            data[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
        elif trial % 4:
            del data[rng.integers(len(data)) :]
        else:
            data += rng.integers(0, 2, 1).astype(np.uint8).tobytes()
        alphabet = int(rng.choice((alphabet, alphabet, 5)))
        accepted += verdicts(bytes(data), alphabet, count + int(rng.integers(-1, 2)))
    assert 25 < accepted < 750


HOSTILE = {
    "empty": "",
    "distance past the end": text(12) + "0" + text(1),
    "a long distance past the end": text(2**20),
    "a distance beyond 32 bits": text(2**33 + 1),
    "an endless number": "1" * 400,
    "level beyond the table": text(10) + "0" + text(4),
    "level beyond 32 bits": text(10) + "1" + text(2**40),
    "word cut off": text(9) + "0" + text(3)[:-1],
    "no end": text(3) + "0" + text(1),
    "padding not zero": text(10) + "0" + text(3) + "1",
    "a byte too many": text(10) + "0" + text(3) + "0" * 8,
}


def test_hostile_streams():
    """10 coordinates of 7 levels; beside them a stream that is right."""
    for case, bits in (HOSTILE | {"right": text(10) + "0" + text(3)}).items():
        bits += "0" * (-len(bits) % 8)
        data = bytes(int(bits[i : i + 8], 2) for i in range(0, len(bits), 8))
        data = data[:1] if case == "word cut off" else data
        assert verdicts(data, 7, 10) == (case == "right"), case


def test_a_corrupt_segment_is_named():
    coder = coder_of(7, 512)
    count = 2 * coder.segment + 777
    codes = some_codes(np.random.default_rng(8), count, 7, 0.1)
    words = torch.empty(coder.packing.words(count), dtype=torch.int32)
    pack(torch.from_numpy(codes), coder.packing, words)
    broken = coder.encode(words, count, count)
    broken[12 + 3000] ^= 255
    with pytest.raises(PayloadError, match="elias stream is corrupt in segment 0"):
        coder.decode(broken, count)


def test_bytes_of_a_payload_are_the_papers_bits():
    """Header, norms, a word of 32 bits, the code of QSGD's section 3.1, the end: all that travels
    in one segment."""
    flat = torch.randn(8192, generator=torch.Generator().manual_seed(1))
    for scheme in (QSGD(bits=2, coding="elias"), QSGD(bits=4, coding="elias")):
        payload = scheme.encode(flat, seed=2)
        values = scheme.decode(payload).double() / flat.double().norm()
        near = (values[:, None] - scheme.levels).abs().argmin(dim=1).numpy()
        numbers = near - len(scheme.levels) // 2
        end = int(8192 - np.flatnonzero(numbers)[-1])
        bits = 32 + sparse_code_bits(numbers) + (code_length(end) if end > 1 else 0)
        assert payload.numel() == 96 + -(-bits // 64) * 8
