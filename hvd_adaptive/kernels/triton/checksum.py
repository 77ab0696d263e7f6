"""Compute checksums of whole payloads in Triton: the same numbers as reference/checksum.py.

Blocks of 4096 words are hashed side by side, one to a program. Their 64 lanes are added to 64 sums
by atomics, whose order does not matter to integers. A second kernel runs the chain over the sums.
Only ``checksum`` waits for the device.

Offsets are 64-bit: a program's first word is its block's number, as int64, times 4096. The one mask
is ``at < n``, in words behind the payload's header.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from hvd_adaptive.base.tensors import from_host, put
from hvd_adaptive.kernels.checksum import BLOCK, CHECKSUM_AT, HEADER_BYTES, LANES, A, B
from hvd_adaptive.kernels.triton.launch import launch, regular_runs

_A, _B = tl.constexpr(A), tl.constexpr(B)
_LANES, _BLOCK = tl.constexpr(LANES), tl.constexpr(BLOCK)
_ROWS = tl.constexpr(BLOCK // LANES)


def seal(payload, header, seed):
    put(torch.frombuffer(bytearray(header), dtype=torch.uint8), payload[:HEADER_BYTES])
    if seed is not None:
        words = payload.view(torch.int32)
        _finish(words[HEADER_BYTES // 4 :], seed, words[CHECKSUM_AT // 4 :])


def checksums(payloads, seeds):
    bodies = [payload[HEADER_BYTES:].view(torch.int32) for payload in payloads]
    sums = _sums(bodies)
    facts = torch.tensor(
        [[body.numel() for body in bodies], [_signed(seed) for seed in seeds]], device="cpu"
    )
    facts = from_host(facts, sums.device)
    out = torch.empty(len(bodies), dtype=torch.int32, device=sums.device)
    launch(_finish_all, len(bodies), out, sums, facts, len(bodies), out, num_warps=1)
    return out


def checksum(words, seed):
    """See reference.checksum.checksum; wait for the device."""
    out = torch.empty(1, dtype=torch.int32, device=words.device)
    _finish(words, seed, out)
    return int(out.item()) & 0xFFFFFFFF


def _finish(words: torch.Tensor, seed: int, out: torch.Tensor) -> None:
    """Write the checksum of words to the first number of ``out`` (int32)."""
    start = _signed((seed + words.numel()) & 0xFFFFFFFF)
    launch(_finish_one, 1, words, _sums([words]), start, out, num_warps=1)


def _sums(bodies: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the 64 sums of each body (int32 words): int32 (bodies, 64)."""
    sums = torch.zeros(len(bodies), LANES, dtype=torch.int32, device=bodies[0].device)
    pairs = list(zip(bodies, sums, strict=True))
    # Bodies of one length at equal distances, as in a gathered tensor, need one launch.
    alike = len({body.numel() for body in bodies}) == 1
    for some in [pairs] if alike else [[pair] for pair in pairs]:
        for first, count, (stride, _) in regular_runs(some):
            body, own = some[first]
            blocks, n = triton.cdiv(body.numel(), BLOCK), body.numel()
            launch(_add_blocks, blocks * count, body, body, stride, n, blocks, own, num_warps=1)
    return sums


def _signed(value: int) -> int:
    """Return the int32 of the same bits."""
    return value - (1 << 32) if value >> 31 else value


_NUMBERS = ("stride", "n", "blocks", "start", "count")


@triton.jit(do_not_specialize=_NUMBERS)
def _add_blocks(words, stride: tl.int64, n: tl.int64, blocks: tl.int64, sums):
    """Add a block of 4096 words of a body to the body's sums; a body has ``blocks`` of them."""
    program = tl.program_id(0).to(tl.int64)
    body, block = program // blocks, program % blocks
    lane = tl.arange(0, _LANES)
    at = block * _BLOCK + lane
    s = tl.zeros((_LANES,), tl.uint32) + block.to(tl.uint32) * _A
    for _ in tl.static_range(_ROWS):
        there = at < n
        word = tl.load(words + body * stride + at, mask=there, other=0)
        t = s + word.to(tl.uint32, bitcast=True) * _B
        s = tl.where(there, ((t << 13) | (t >> 19)) * _A, s)
        at += _LANES
    mixed = (s ^ (s >> 15)) * _B
    tl.atomic_add(sums + body * _LANES + lane, mixed.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def _chain(sums, start):
    """Run the chain over 64 sums, from uint32 ``start``: int32."""
    total = start
    for lane in tl.static_range(_LANES):
        total = (total ^ tl.load(sums + lane).to(tl.uint32, bitcast=True)) * _A
        total = (total ^ (total >> 15)) * _B
    return total.to(tl.int32, bitcast=True)


@triton.jit(do_not_specialize=_NUMBERS)
def _finish_one(sums, start: tl.int32, out):
    """Finish one checksum. start: the sum of the seed and the number of words."""
    tl.store(out, _chain(sums, start.to(tl.uint32, bitcast=True)))


@triton.jit(do_not_specialize=_NUMBERS)
def _finish_all(sums, facts, count: tl.int64, out):
    """Finish all checksums. facts: int64 (2, count), words and seeds of the bodies."""
    body = tl.program_id(0).to(tl.int64)
    n, seed = tl.load(facts + body), tl.load(facts + count + body)
    tl.store(out + body, _chain(sums + body * _LANES, seed.to(tl.uint32) + n.to(tl.uint32)))
