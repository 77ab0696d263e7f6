"""Bodies of dithered payloads by the Triton kernels: the CPU's byte for byte; what the CPU refuses
they refuse."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from triton_interpreter import DEVICE, moved

from hvd_adaptive.errors import PayloadError
from hvd_adaptive.kernels.dithered import CODED, most_bytes
from hvd_adaptive.kernels.numba import dithered
from hvd_adaptive.kernels.triton import dithered as cuda_bodies
from hvd_adaptive.kernels.triton import dithered_decode as cuda_dithered_decode
from hvd_adaptive.kernels.triton import dithered_encode as cuda_dithered_encode
from hvd_adaptive.kernels.triton import dithered_runs as cuda_dithered
from hvd_adaptive.schemes.dithered_code import DitheredCode, gaussian_code

SEGMENT, KEY = 256, (1 << 63) + 5


def values(n: int, with_nan: bool = True) -> torch.Tensor:
    """Gaussian; some of their buckets with NaN, of zeros, or with outliers that escape."""
    flat = torch.randn(n, generator=torch.Generator().manual_seed(n))
    if n >= 300:
        flat[3], flat[100:210] = float("nan") if with_nan else 1.0, 0.0
        flat[250], flat[251], flat[-1] = 1e3, -1e4, 50.0
    return flat


def body_of(flat: torch.Tensor, bucket: int, code: DitheredCode, width: int) -> torch.Tensor:
    """By the CPU."""
    body = torch.empty(most_bytes(flat.numel(), bucket, width), dtype=torch.uint8)
    return body[: dithered.encode_body(flat, bucket, code, KEY, width, body, SEGMENT)]


def padded(body: torch.Tensor) -> torch.Tensor:
    return torch.cat([body, body.new_zeros(-body.numel() % 8)])


def far_off(code: DitheredCode) -> DitheredCode:
    """With books for data that are all zeros, so that nearly every integer escapes."""
    law = np.full((len(code.probabilities), 4), 1e-6)
    law[:, 1] = 1.0
    return dataclasses.replace(code, probabilities=law)


# Four classes and one; trees and single symbols; symbols of a byte and of two; whole tiles, buckets
# shorter than a tile and longer than a segment; integers, which are shorter where the books do not
# fit the data or segments' ends alone are longer.
CASES = {
    "four classes": (380, 100, 1.5, 2, None),
    "aligned": (330, 128, 1.0, 2, None),
    "one class": (300, 64, 0.1, 2, None),
    "long buckets, two bytes": (300, 300, 1 / 64, 4, None),
    "integers": (100, 50, 1 / 64, 2, far_off),
    "wide integers": (1, 1, 1 / 64, 4, None),
    "one coordinate": (1, 1, 1.0, 2, None),
}


@pytest.mark.parametrize("case", CASES)
def test_bodies_and_values_are_the_cpus(case: str):
    n, bucket, delta, width, changed = CASES[case]
    code = gaussian_code(None, delta)
    code = changed(code) if changed else code
    flat = values(n, bucket < n)
    wanted = body_of(flat, bucket, code, width)
    kind = int(wanted[0])
    assert kind == (width if changed or n == 1 else CODED)
    room = torch.full((most_bytes(n, bucket, width),), 7, dtype=torch.uint8, device=DEVICE)
    with np.errstate(all="ignore"):
        used = cuda_dithered_encode.encode(*moved(flat), bucket, code, KEY, width, room, SEGMENT)
    assert torch.equal(room[:used].cpu(), wanted)

    sums = torch.linspace(-1, 1, n), torch.linspace(-1, 1, n).to(DEVICE)
    bodies, keys = [padded(wanted)] * 2, [KEY, KEY + 1 if kind else KEY]
    dithered.add_bodies(bodies, bucket, code, keys, width, sums[0], SEGMENT)
    found = cuda_dithered_decode.add(moved(*bodies), bucket, code, keys, width, sums[1], SEGMENT)
    assert found.get().tolist() == [0, 0]
    assert torch.equal(sums[0].isnan(), sums[1].cpu().isnan())
    assert torch.equal(sums[0].nan_to_num(), sums[1].cpu().nan_to_num())


@pytest.mark.parametrize(("delta", "n", "bucket"), [(1.5, 380, 33), (0.5, 300, 64)])
def test_segments_of_many_tiles(monkeypatch: pytest.MonkeyPatch, delta: float, n: int, bucket: int):
    """As they are beyond tests; books of few symbols make escapes in all of the tiles."""
    monkeypatch.setattr(cuda_dithered, "_TILE", 64)
    monkeypatch.setattr(cuda_dithered_decode, "_TILE", 16)
    code = gaussian_code(None, delta)
    code = dataclasses.replace(code, probabilities=np.full((len(code.probabilities), 4), 0.25))
    flat = values(n)
    wanted = body_of(flat, bucket, code, 2)
    assert wanted[0] == CODED
    room = torch.empty(most_bytes(n, bucket, 2), dtype=torch.uint8, device=DEVICE)
    sums = torch.zeros(n), torch.zeros(n, device=DEVICE)
    with np.errstate(all="ignore"):
        used = cuda_dithered_encode.encode(*moved(flat), bucket, code, KEY, 2, room, SEGMENT)
    assert torch.equal(room[:used].cpu(), wanted)
    body = padded(wanted)
    dithered.add_bodies([body], bucket, code, [KEY], 2, sums[0], SEGMENT)
    told = cuda_dithered_decode.add(moved(body), bucket, code, [KEY], 2, sums[1], SEGMENT)
    assert told.get().tolist() == [0]
    assert torch.equal(sums[0].nan_to_num(7.0), sums[1].cpu().nan_to_num(7.0))


def spoiled(body: torch.Tensor, head: int, seed: int) -> torch.Tensor:
    """A bit, a byte, or an offset of another value, cut short, or followed by what is not 0."""
    rng = np.random.default_rng(seed)
    bad = padded(body)
    ways = seed % 5
    if ways == 0:
        bad[int(rng.integers(head, body.numel()))] ^= 1 << int(rng.integers(0, 8))
    elif ways == 1:
        bad[int(rng.integers(0, head))] = int(rng.integers(0, 256))
    elif ways == 2:
        bad[head + int(rng.integers(0, 24))] = int(rng.integers(0, 256))
    elif ways == 3:
        bad = bad[: head + int(rng.integers(0, bad.numel() - head)) // 8 * 8].clone()
    else:
        bad = torch.cat([bad, torch.full((8,), int(rng.integers(0, 2)), dtype=torch.uint8)])
    return bad


@pytest.mark.parametrize(
    ("n", "bucket", "delta", "changed", "count"),
    [(320, 100, 1.5, None, 20), (60, 30, 1 / 64, far_off, 15)],
)
def test_what_the_cpu_refuses_is_refused(n: int, bucket: int, delta: float, changed, count: int):
    """And what it reads is read alike."""
    code = gaussian_code(None, delta)
    code = changed(code) if changed else code
    body = body_of(values(n), bucket, code, 2)
    head = 4 + 4 * -(-n // bucket)
    bodies = [spoiled(body, head, seed) for seed in range(count)]
    wanted, good, total = [], [], torch.zeros(n)
    for bad in bodies:
        out = torch.zeros(n)
        try:
            dithered.add_bodies([bad], bucket, code, [KEY], 2, out, SEGMENT)
        except PayloadError:
            wanted.append(False)
        else:
            wanted.append(True)
            good.append(bad)
            total += out
    there = torch.zeros(n, device=DEVICE)
    keys = [KEY] * len(bodies)
    with np.errstate(all="ignore"):
        flags = cuda_dithered_decode.add(
            moved(*bodies), bucket, code, keys, 2, there, SEGMENT
        ).get()
        assert [flag == 0 for flag in flags.tolist()] == wanted
        assert 0 < len(good) < len(bodies)
        there.zero_()
        cuda_dithered_decode.add(moved(*good), bucket, code, keys[: len(good)], 2, there, SEGMENT)
    assert torch.equal(there.cpu().isnan(), total.isnan())
    assert torch.equal(there.cpu().nan_to_num(), total.nan_to_num())
    for flag in set(flags.tolist()) - {0}:
        with pytest.raises(PayloadError, match="payload"):
            cuda_bodies._judge([0, flag])


def test_payloads_beyond_the_scratch_memory_wait_for_their_turn(monkeypatch: pytest.MonkeyPatch):
    code, flat = gaussian_code(None, 1.5), values(90)
    body, sums = padded(body_of(flat, 100, code, 2)), []
    for scratch in (cuda_dithered_decode.MOST_SCRATCH, 1):
        monkeypatch.setattr(cuda_dithered_decode, "MOST_SCRATCH", scratch)
        out = torch.zeros(90, device=DEVICE)
        keys = [KEY] * 3
        told = cuda_dithered_decode.add(moved(body, body, body), 100, code, keys, 2, out, SEGMENT)
        assert told.get().tolist() == [0, 0, 0]
        sums.append(out)
    assert torch.equal(*sums)
