"""Where ECDQ is not the best: vectors that are mostly zero, at low rates (docs/choosing.md)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hvd_adaptive import ECDQ, QSGD

COORDINATES, DENSITY = 64 * 8192, 0.05


def rate_and_error(compressor, values: np.ndarray) -> tuple[float, float]:
    """Bits per coordinate of the whole payload, and ||Q(v) - v||² / ||v||², in NumPy."""
    flat = torch.from_numpy(values)
    compressor.fit(flat)
    payload = compressor.encode(flat, seed=1)
    decoded = compressor.decode(payload).double().numpy()
    error = np.square(decoded - values).sum() / np.square(values.astype(np.float64)).sum()
    return 8 * payload.numel() / values.size, float(error)


def test_a_coded_table_with_a_zero_has_a_quarter_of_its_error_at_half_a_bit():
    draw = np.random.default_rng(0)
    values = draw.normal(size=COORDINATES) * (draw.random(COORDINATES) < DENSITY)
    values = values.astype(np.float32)
    bits, error = rate_and_error(ECDQ(bits=0.5, keep_zeros=True), values)
    table_bits, table_error = rate_and_error(QSGD(bits=8, coding="huffman"), values)
    assert bits == pytest.approx(0.5, abs=0.01) and table_bits == pytest.approx(0.5, abs=0.01)
    assert error / table_error == pytest.approx(4, rel=0.1)
    # Of which its zeros, whose places take half of the bits, are a part no longer.
    bits, rounded = rate_and_error(ECDQ(bits=0.5), values)
    assert bits == pytest.approx(0.5, abs=0.01) and rounded / table_error == pytest.approx(
        9, rel=0.1
    )
    # Dense coordinates: the other way round, at the same rate.
    dense = draw.normal(size=COORDINATES).astype(np.float32)
    table_bits, table_error = rate_and_error(QSGD(bits=4, norm="linf", coding="huffman"), dense)
    bits, error = rate_and_error(ECDQ(bits=round(table_bits, 3)), dense)
    assert bits == pytest.approx(table_bits, rel=0.01) and error < table_error / 2
