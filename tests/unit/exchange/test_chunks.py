"""Cutting groups into one chunk for each owner."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_adaptive.exchange.scatter_reduce import cut


@given(st.integers(0, 5000), st.integers(0, 300), st.integers(1, 700), st.integers(1, 9))
def test_chunks_cover_a_group_in_order(quantized, full, bucket, owners):
    """Each coordinate once, ends at bucket boundaries, sizes as even as whole buckets allow."""
    chunks = cut(quantized, full, bucket, owners)
    assert len(chunks) == owners
    assert [i for c in chunks for i in range(c.begin, c.end)] == list(range(quantized))
    places = [i for c in chunks for i in range(c.full_begin, c.full_end)]
    assert places == list(range(quantized, quantized + full))
    assert all(c.begin % bucket == 0 or c.begin == quantized for c in chunks)
    buckets = [-(-c.quantized // bucket) for c in chunks]
    assert sum(buckets) == -(-quantized // bucket)
    assert max(buckets) - min(buckets) <= 1
    assert max(c.full for c in chunks) - min(c.full for c in chunks) <= 1


@given(st.integers(0, 900), st.integers(0, 50), st.integers(1, 100), st.integers(1, 5))
def test_put_is_the_inverse_of_of(quantized, full, bucket, owners):
    flat = torch.arange(quantized + full, dtype=torch.float64)
    out = torch.full_like(flat, -1)
    for chunk in cut(quantized, full, bucket, owners):
        own = flat.new_empty(chunk.coordinates)
        chunk.take(flat, own)
        assert own.numel() == chunk.coordinates
        chunk.put(own, out)
    assert torch.equal(out, flat)
