"""Dithered quantisation: kernels bit for bit, the integers and symbols they are told to be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import unit_oracles as oracle
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import KINDS, heavy, ordinary, same_bits, vector

from hvd_adaptive.kernels.dithered import Stretch
from hvd_adaptive.kernels.numba import ecdq as cpu_ecdq
from hvd_adaptive.kernels.reference import ecdq as reference_ecdq

MODULES = (reference_ecdq, cpu_ecdq)
DELTAS = (1 / 256, 0.3, 1.5, 16.0)


def split(module, flat, where: Stretch, classes, most):
    """Runs and the escapes' bytes, from either module."""
    dtype = np.uint8 if most < 127 else np.uint16
    splitter = module.Splitter(where.end - where.begin, classes, most, dtype)
    runs, escaped = splitter(flat, where)
    return runs, module.put_numbers(escaped, most).tobytes()


def compare(flat: torch.Tensor, bucket: int, delta: float, classes: int, most: int, key: int):
    what, n = f"n={flat.numel()} bucket={bucket} delta={delta}", flat.numel()
    bucket = max(1, min(bucket, n))
    steps = [module.bucket_steps(flat, bucket, delta) for module in MODULES]
    assert same_bits(*steps), what
    steps = steps[0]
    q = [module.quantize(flat, steps, bucket, key) for module in MODULES]
    assert torch.equal(*q), what
    results = [torch.linspace(-1, 1, n) for _ in range(4)]
    for module, out in zip(MODULES, results[:2], strict=True):
        module.add(q[0], steps, bucket, key, out)
    for begin in range(0, n, 700):
        where = Stretch(steps, bucket, key, begin, min(n, begin + 700))
        parts = [split(m, flat, where, classes, most) for m in MODULES]
        assert parts[0][1] == parts[1][1], what
        for run, same in zip(parts[0][0], parts[1][0], strict=True):
            np.testing.assert_array_equal(run, same, what)
        counts = [module.counts(where, classes) for module in MODULES]
        assert list(counts[0]) == list(counts[1]) == [run.size for run in parts[0][0]], what
        escaped = cpu_ecdq.numbers(np.frombuffer(parts[1][1], np.uint8), most)
        runs = np.zeros((classes, max(counts[0])), np.uint8 if most < 127 else np.uint16)
        for row, run in zip(runs, parts[1][0], strict=True):
            row[: run.size] = run
        for module, out in zip(MODULES, results[2:], strict=True):
            assert module.add_runs(runs, escaped, where, most, out), what
    assert all(same_bits(results[0], out) for out in results[1:]), what


@pytest.mark.parametrize("bucket", (1, 7, 100, 512, 1000))
def test_same_integers_and_sums_for_all_sizes(bucket):
    sizes = sorted({0, 1, bucket - 1, bucket, bucket + 1, 63, 511, 513, 2000})
    for n, delta in zip(sizes, 3 * DELTAS, strict=False):
        classes, most = (1, 2, 4)[n % 3], (1, 3, 127, 511)[n % 4]
        compare(vector(heavy, n), bucket, delta, classes, most, key=n * 2654435761)


@pytest.mark.many
@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_same_integers_and_sums_for_all_kinds_of_vectors(kind, delta):
    for bucket in (1, 129, 700):
        compare(vector(kind, 3 * min(bucket, 400) + 1), bucket, delta, 4, 2, key=2**64 - bucket)


def test_integers_and_values_are_as_told():
    """In float64, from the random integers: q is the nearest to v/Δ + u, and stands for Δ(q - u)
    where u has the dither's sign and size; ties and float32's rounding are left out."""
    flat, bucket, key = vector(ordinary, 1300), 500, 99
    steps = cpu_ecdq.bucket_steps(flat, bucket, 1.5)
    for b, part in enumerate(flat.split(bucket)):
        size = float(part.double().square().mean().sqrt())
        assert abs(float(steps[b]) - 1.5 * size) < 1e-6 * size
    q = cpu_ecdq.quantize(flat, steps, bucket, key)
    k = np.concatenate([oracle.uniform_integers(key, b, n) for b, n in enumerate((500, 500, 300))])
    negative = k >= 2**23
    u = np.where(negative, -1.0, 1.0) * (k % 2**23 + 0.5) / 2**24
    # u takes each multiple of 2**-24 and a half once in (-1/2, 1/2).
    assert set(np.abs(u) < 0.5) == {True} and set((u * 2**24) % 1) == {0.5}
    step = steps.double().numpy().repeat(bucket)[:1300]
    y = flat.double().numpy() / step + u
    signed = np.where(negative, -1, 1) * q.numpy()
    sure = np.abs(y - np.floor(y) - 0.5) > 1e-6
    np.testing.assert_array_equal(signed[sure], np.rint(y)[sure])
    assert sure.mean() > 0.99
    out = torch.zeros(1300)
    cpu_ecdq.add(q, steps, bucket, key, out)
    np.testing.assert_allclose(out.double().numpy(), step * (signed - u), rtol=0, atol=1e-6)
    runs, _ = split(cpu_ecdq, flat, Stretch(steps, bucket, key, 0, 1300), 4, 5)
    quarter = (k % 2**23) // 2**21
    for c in range(4):
        np.testing.assert_array_equal(runs[c], np.minimum(q.numpy()[quarter == c] + 5, 11))


@given(st.lists(st.integers(0, 2**24), max_size=30), st.integers(1, 511), st.data())
def test_escaped_integers_survive(sizes, most, data):
    signs = data.draw(st.lists(st.sampled_from((-1, 1)), min_size=len(sizes), max_size=len(sizes)))
    values = np.array([s * (n + most + 1) for s, n in zip(signs, sizes, strict=True)], np.int32)
    packed = cpu_ecdq.put_numbers(values, most)
    np.testing.assert_array_equal(cpu_ecdq.numbers(packed, most), values)
    # 7 bits to a byte, the sign among them.
    assert packed.size == sum(max(1, -(-(2 * n + 1).bit_length() // 7)) for n in sizes)


@given(st.binary(max_size=12), st.integers(1, 511))
def test_any_bytes_are_read_alike_or_refused(data, most):
    found = cpu_ecdq.numbers(np.frombuffer(data, np.uint8), most)
    told = reference_ecdq.numbers(np.frombuffer(data, np.uint8), most)
    assert (found is None) == (told is None)
    if found is not None:
        assert found.tolist() == told.tolist() and all(most < abs(q) <= 2**30 + most for q in told)
        assert cpu_ecdq.put_numbers(found, most).tobytes() == data  # one way alone to write them


def test_escapes_that_do_not_fit_are_refused():
    flat = vector(heavy, 600)
    steps = cpu_ecdq.bucket_steps(flat, 600, 0.5)
    where = Stretch(steps, 600, 3, 0, 600)
    runs, escaped = cpu_ecdq.Splitter(600, 1, 1, np.uint8)(flat, where)
    assert escaped.size > 5
    for wrong in (escaped[:-1], np.append(escaped, 7).astype(np.int32), escaped[:0]):
        out = torch.zeros(600)
        assert not cpu_ecdq.add_runs(np.array(runs), wrong, where, 1, out)
