"""What floating point may add to an error: bounds that are generous beside a unit in the last
place, and tiny beside any quantiser's step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from oracle.laws import Law

UNITS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
SMALLEST = {"float16": 2.0**-24}
# float32 scales, levels, products, random numbers of 24 bits, comparisons: of the largest value.
QUANTISED = 2.0**-20


def unit_of(dtype: str) -> float:
    """Of a dtype's name, with or without "torch."."""
    return UNITS[dtype.removeprefix("torch.")]


def of_quantised(laws: Sequence[Law], dtype: str, roundings: int = 1) -> np.ndarray:
    """Of a mean of these laws, rounded so many times to ``dtype``."""
    most = sum(np.maximum(np.abs(law.low), np.abs(law.high)) for law in laws) / len(laws)
    least = SMALLEST.get(dtype.removeprefix("torch."), 2.0**-126)
    return np.nan_to_num((QUANTISED + roundings * unit_of(dtype)) * most) + roundings * least


def of_full(vectors: Sequence[np.ndarray], dtype: str, roundings: int = 1) -> np.ndarray:
    """Of an exact mean, summed in float32 at least."""
    most = sum(np.abs(v) for v in vectors) / len(vectors)
    name = dtype.removeprefix("torch.")
    sums = 2.0**-50 if name == "float64" else 2.0**-22
    least = SMALLEST.get(name, 0.0 if name == "float64" else 2.0**-126)
    return np.nan_to_num((sums * len(vectors) + roundings * unit_of(name)) * most) + least
