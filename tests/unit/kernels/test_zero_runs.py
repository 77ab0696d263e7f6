"""Where zeros are: both backends alike, read by tests/wire_decoder.py; hostile streams."""

from __future__ import annotations

import itertools
import math
import struct

import numpy as np
import pytest
import torch
import wire_decoder as wire
from hypothesis import example, given
from hypothesis import strategies as st

from hvd_adaptive.kernels.numba import zeros as cpu
from hvd_adaptive.kernels.reference import zeros as reference
from hvd_adaptive.kernels.zeros import Runs, most_stream_bytes

BACKENDS = {"reference": reference, "numba": cpu}
each_backend = pytest.mark.parametrize("ops", BACKENDS.values(), ids=BACKENDS)


def alternating(lengths: list[int], first: bool) -> list[bool]:
    """Which coordinates are not zero: runs of these lengths in turn."""
    return [first ^ bool(i % 2) for i, length in enumerate(lengths) for _ in range(length)]


patterns = st.one_of(
    st.lists(st.booleans(), max_size=400),
    st.builds(
        alternating, st.lists(st.sampled_from([1, 2, 63, 64, 65, 500]), max_size=9), st.booleans()
    ),
    st.lists(st.sampled_from([True] * 40 + [False]), max_size=400),
    st.lists(st.sampled_from([False] * 40 + [True]), max_size=400),
)


def vector(there: list[bool]) -> torch.Tensor:
    """Numbers, zeros of both signs and the least number that is not zero."""
    values = torch.tensor([1.5, -2.0, 1e-45, math.nan, math.inf]).repeat(len(there) // 5 + 1)
    zeros = torch.tensor([0.0, -0.0]).repeat(len(there) // 2 + 1)
    return torch.where(
        torch.tensor(there, dtype=torch.bool), values[: len(there)], zeros[: len(there)]
    )


def runs_of(there: list[bool]) -> int:
    """How many runs of zeros there are."""
    return sum(before and not own for before, own in itertools.pairwise([True, *there]))


@given(patterns)
@example([False])
@example([True])
@example([False] * 64)
@example([True] * 63 + [False, False] + [True] * 63)
def test_any_pattern_is_described_and_read_again(there):
    flat = vector(there)
    assert cpu.has_zeros(flat) == reference.has_zeros(flat) == (False in there)
    if False not in there:
        return
    assert most_stream_bytes(len(there)) == math.ceil((len(there) + 1) / 64) * 8
    for ops in BACKENDS.values():
        mask, runs = ops.mark(flat)
        assert runs == (len(there), there.count(False), runs_of(there))
        marked = np.unpackbits(mask.numpy(), bitorder="little")
        assert marked[: len(there)].tolist() == there and not marked[len(there) :].any()
        stream = ops.write(mask, runs)
        section = struct.pack("<QQ", runs.zeros, runs.runs) + stream.numpy().tobytes()
        assert wire.places(section, len(there)).tolist() == there
        assert stream.numel() <= most_stream_bytes(len(there))
        assert torch.equal(ops.read(stream, runs), mask)


@given(patterns)
@each_backend
def test_other_coordinates_are_taken_out_and_put_back(ops, there):
    flat = vector(there)
    if False not in there:
        return
    mask, _ = ops.mark(flat)
    named = torch.tensor(there, dtype=torch.bool)
    values = torch.empty(int(named.sum()))
    ops.take(flat, mask, values)
    assert torch.equal(values.view(torch.int32), flat[named].view(torch.int32))
    for clear, others in ((True, 0.0), (False, 7.0)):
        out = torch.full((len(there),), 7.0)
        ops.put(values, mask, out, clear)
        assert torch.equal(out[named].view(torch.int32), flat[named].view(torch.int32))
        assert (out[~named] == others).all()


@given(
    st.binary(min_size=8, max_size=40).map(lambda data: data[: len(data) // 8 * 8]),
    st.integers(1, 400),
    st.integers(1, 400),
    st.integers(1, 20),
)
def test_a_stream_of_any_bytes_is_refused_or_read_alike(data, coordinates, zeros, count):
    """What is read is a mask of so many zeros in so many runs, and has this very stream."""
    runs = Runs(coordinates, min(zeros, coordinates), count)
    if not runs.are_possible:
        return
    stream = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
    masks = [ops.read(stream, runs) for ops in BACKENDS.values()]
    assert (masks[0] is None) == (masks[1] is None)
    if masks[0] is not None:
        assert torch.equal(*masks)
        marked = np.unpackbits(masks[0].numpy(), bitorder="little")[:coordinates].tolist()
        assert marked.count(0) == runs.zeros and runs_of(marked) == runs.runs
        assert torch.equal(cpu.write(masks[1], runs), stream)


@given(patterns, st.data())
def test_a_stream_with_one_other_bit_is_no_longer_that_of_the_mask(there, data):
    if False not in there:
        return
    mask, runs = cpu.mark(vector(there))
    stream = cpu.write(mask, runs)
    at = data.draw(st.integers(0, 8 * stream.numel() - 1))
    stream[at // 8] ^= 1 << at % 8
    for ops in BACKENDS.values():
        read = ops.read(stream, runs)
        assert read is None or not torch.equal(read, mask)


def test_numbers_that_no_vector_has_are_told():
    assert Runs(10, 3, 2).are_possible
    # The second: two others divide zeros into three runs.
    for zeros, runs in ((3, 4), (8, 4), (0, 0), (11, 1), (-1, 1)):
        assert not Runs(10, zeros, runs).are_possible


@pytest.mark.parametrize(("share", "most"), [(0.01, 0.093), (0.1, 0.55), (0.5, 1.0), (0.99, 0.093)])
def test_scattered_zeros_take_few_more_bits_than_their_entropy(share, most):
    """0.081, 0.469, 1 and 0.081 bits a coordinate."""
    generator = torch.Generator().manual_seed(1)
    flat = (torch.rand(100_000, generator=generator) >= share).to(torch.float32)
    assert 8 * cpu.write(*cpu.mark(flat)).numel() / flat.numel() <= most + 0.002


def test_zero_rows_take_little():
    """Of 64 coordinates, half of them at random: 1/64 bit a coordinate would be the least."""
    generator = torch.Generator().manual_seed(1)
    flat = (torch.rand(10_000, generator=generator) < 0.5).repeat_interleave(64)
    assert 8 * cpu.write(*cpu.mark(flat.to(torch.float32))).numel() / flat.numel() < 0.065
