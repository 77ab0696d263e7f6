"""Dithered quantisation: the integers and symbols that kernels are told to find, and escapes."""

from __future__ import annotations

import numpy as np
import unit_oracles as oracle
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import heavy, ordinary, vector

from hvd_adaptive.kernels.dithered import Stretch
from hvd_adaptive.kernels.numba import ecdq as cpu_ecdq


def test_integers_and_values_are_as_told():
    """In float64, from the random integers: q is the nearest to v/Δ + u, and stands for Δ(q - u)
    where u has the dither's sign and size; ties and float32's rounding are left out."""
    flat, bucket, key = vector(ordinary, 1300), 500, 99
    x = flat.numpy()
    steps = cpu_ecdq.bucket_steps(x, bucket, 1.5)
    for b, part in enumerate(flat.split(bucket)):
        size = float(part.double().square().mean().sqrt())
        assert abs(float(steps[b]) - 1.5 * size) < 1e-6 * size
    q = cpu_ecdq.quantize(x, steps, bucket, key)
    k = np.concatenate([oracle.uniform_integers(key, b, n) for b, n in enumerate((500, 500, 300))])
    negative = k >= 2**23
    u = np.where(negative, -1.0, 1.0) * (k % 2**23 + 0.5) / 2**24
    # u takes each multiple of 2**-24 and a half once in (-1/2, 1/2).
    assert set(np.abs(u) < 0.5) == {True} and set((u * 2**24) % 1) == {0.5}
    step = steps.astype(np.float64).repeat(bucket)[:1300]
    y = flat.double().numpy() / step + u
    signed = np.where(negative, -1, 1) * q
    sure = np.abs(y - np.floor(y) - 0.5) > 1e-6
    np.testing.assert_array_equal(signed[sure], np.rint(y)[sure])
    assert sure.mean() > 0.99
    out = np.zeros(1300, np.float32)
    cpu_ecdq.add(q, steps, bucket, key, out)
    np.testing.assert_allclose(out, step * (signed - u), rtol=0, atol=1e-6)
    where = Stretch(steps, bucket, np.uint64(key), 0, 1300)
    rooms = np.empty((4, 1300), np.uint8), np.empty(1300, np.int32)
    runs, _ = cpu_ecdq.split(x, where, 5, *rooms)
    quarter = (k % 2**23) // 2**21
    for c in range(4):
        np.testing.assert_array_equal(runs[c], np.minimum(q[quarter == c] + 5, 11))


@given(st.lists(st.integers(0, 2**30 - 1), max_size=30), st.integers(1, 511), st.data())
def test_escaped_integers_survive(sizes, most, data):
    signs = data.draw(st.lists(st.sampled_from((-1, 1)), min_size=len(sizes), max_size=len(sizes)))
    values = np.array([s * (n + most + 1) for s, n in zip(signs, sizes, strict=True)], np.int32)
    packed = cpu_ecdq.put_numbers(values, most)
    np.testing.assert_array_equal(cpu_ecdq.numbers(packed, most), values)
    # 7 bits to a byte, the sign among them.
    assert packed.size == sum(max(1, -(-(2 * n + 1).bit_length() // 7)) for n in sizes)


@given(st.binary(max_size=12), st.integers(1, 511))
def test_any_bytes_are_refused_or_are_those_of_integers(data, most):
    found = cpu_ecdq.numbers(np.frombuffer(data, np.uint8), most)
    if found is not None:
        assert all(most < abs(q) <= 2**30 + most for q in found.tolist())
        assert cpu_ecdq.put_numbers(found, most).tobytes() == data  # one way alone to write them


def test_escapes_that_do_not_fit_are_refused():
    flat = vector(heavy, 600).numpy()
    where = Stretch(cpu_ecdq.bucket_steps(flat, 600, 0.5), 600, np.uint64(3), 0, 600)
    rooms = np.empty((1, 600), np.uint8), np.empty(600, np.int32)
    runs, escaped = cpu_ecdq.split(flat, where, 1, *rooms)
    assert escaped.size > 5
    for wrong in (escaped[:-1], np.append(escaped, 7).astype(np.int32), escaped[:0]):
        out = np.zeros(600, np.float32)
        assert not cpu_ecdq.add_runs(np.array(runs), wrong, where, 1, out)
